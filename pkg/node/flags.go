package node

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// Mount flags are recorded as what they hash to: they may be secret (CSI specification,
// MountVolume.mount_flags), and the kernel does not show all that it was given. The SELinux
// context is hashed by itself, as a publication has to agree with that.

// flagsOf stands for mount flags, whatever their order: HASH.HASH, of all and of the SELinux
// context.
func flagsOf(options []string) string {
	all := mount.SplitOptions(options...)
	return hashOf(all) + "." + hashOf(contextOf(all))
}

func hashOf(options []string) string {
	options = slices.Clone(options)
	slices.Sort(options)
	sum := sha256.Sum256([]byte(strings.Join(slices.Compact(options), "\x00")))
	return hex.EncodeToString(sum[:12])
}

// contextOf returns those of SELinux (mount(8)).
func contextOf(options []string) []string {
	return slices.DeleteFunc(slices.Clone(options), func(option string) bool {
		key, _, _ := strings.Cut(option, "=")
		return !slices.Contains([]string{"context", "fscontext", "defcontext", "rootcontext"}, key)
	})
}

// sameContext reports whether options name no SELinux context, or that of the flags (empty: not
// known) that a volume is staged with.
func sameContext(flags string, options []string) bool {
	context := contextOf(mount.SplitOptions(options...))
	_, staged, known := strings.Cut(flags, ".")
	return !known || len(context) == 0 || staged == hashOf(context)
}
