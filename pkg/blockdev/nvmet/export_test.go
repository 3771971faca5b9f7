package nvmet

const Root = root

var Ports = ports

// OnChange has a function called before each change.
func OnChange(f func()) { change = f }

// NoGrace: nobody is connected.
func NoGrace() { grace = 0 }

// Unopened is a target that was not opened.
func Unopened(authenticates bool) *Target { return &Target{authenticates: authenticates} }
