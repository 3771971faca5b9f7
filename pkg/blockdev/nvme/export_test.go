package nvme

// Shown is what sysfs says of a controller in a folder.
func Shown(folder string) Device { return controller(folder).device() }

// Plain reports whether Connect takes what is connected for less than it was asked for.
func (c Connection) Plain(have Device) bool { return c.plain(have) }
