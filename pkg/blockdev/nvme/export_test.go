package nvme

// Shown returns what sysfs says of a controller in a folder.
func Shown(folder string) Device { return controller(folder).device() }

// Plain reports whether Connect takes a connection to be without the TLS that it should have.
func (c Connection) Plain(have Device) bool { return c.plain(have) }
