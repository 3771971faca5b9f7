package nvmet

const Root = root

var Ports = ports

// OnChange has f called before each change of the kernel's target.
func OnChange(f func()) { change = f }

// NoGrace takes away grace: nobody is connected in these tests.
func NoGrace() { grace = 0 }

// Unopened returns a target that was not opened.
func Unopened(authenticates bool) *Target { return &Target{authenticates: authenticates} }
