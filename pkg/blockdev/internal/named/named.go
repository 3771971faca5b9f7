// Package named tells from the kernel's names of a device which object has its bytes there, when its pool cannot be asked. Names are no proof: root can give a
// device any name.
package named

import (
	"path"
	"regexp"
	"strings"
)

// NQN begins the names of all subsystems and hosts of NVMe over TCP that this driver makes.
const NQN = "nqn.2026-11.dev.ashlar:"

// Image returns the directory of a file pool and the key of the object whose image is at a path, as sysfs has it of a loop device; ok is false for the path of
// another file.
func Image(file string) (directory, key string, ok bool) {
	file = strings.TrimSuffix(strings.TrimSpace(file), " (deleted)")
	found := imagePattern.FindStringSubmatch(path.Base(path.Dir(file)) + "/" + path.Base(file))
	if found == nil {
		return "", "", false
	}
	return found[1], strings.Clone(found[2]), true // a clone, which does not keep the whole path in memory
}

var imagePattern = regexp.MustCompile(`^(volumes|snapshots|marks)/([0-9a-f]{32})\.img$`)

// Mapped returns the object whose device a device of the device mapper is by its name: KIND.KEY, KIND.POOL.KEY, or the label of a file pool
// KIND.KEY.DIRECTORY, with what may be before and behind it.
func Mapped(device string) (kind, key string, ok bool) {
	found := mappedPattern.FindStringSubmatch(device)
	if found == nil {
		return "", "", false
	}
	return found[1], found[2], true
}

var mappedPattern = regexp.MustCompile(`(?:^|-)(vol|snap)\.(?:[a-z0-9-]+\.)?([0-9a-f]{32})(?:\.[0-9a-f]+\.[0-9a-f]+)?(?:-[a-z]+)?$`)

// OfObject reports whether a device of the device mapper has, by its name, bytes of an object: those that Mapped knows, and what is above and below them.
func OfObject(device string) bool { return objectPattern.MatchString(device) }

var objectPattern = regexp.MustCompile(`(?:^|[-.])(?:vol|snap|marks|grow)\.(?:[a-z0-9-]+\.)?[0-9a-f]{32}(?:[-._]|$)`)
