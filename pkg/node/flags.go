package node

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// This file compares the mount flags of a volume with those that it was staged with. The kernel does not show all that it was given, so they are recorded;
// as hashes, as they may be secret (CSI specification, MountVolume.mount_flags). The SELinux context has a hash of its own, as a publication has to agree
// with that alone.

// flagsOf returns the record of mount flags, whatever their order: HASH.HASH, of all flags and of the SELinux context.
func flagsOf(options []string) string {
	all := mount.SplitOptions(options...)
	return hashOf(all) + "." + hashOf(contextOf(all))
}

// hashOf returns the first 12 bytes of a SHA-256 of options, in hex, whatever their order.
func hashOf(options []string) string {
	options = slices.Clone(options)
	slices.Sort(options)
	sum := sha256.Sum256([]byte(strings.Join(slices.Compact(options), "\x00")))
	return hex.EncodeToString(sum[:12])
}

// contextOf returns the options for SELinux (mount(8)).
func contextOf(options []string) []string {
	return slices.DeleteFunc(slices.Clone(options), func(option string) bool {
		key, _, _ := strings.Cut(option, "=")
		return !slices.Contains([]string{"context", "fscontext", "defcontext", "rootcontext"}, key)
	})
}

// sameContext reports whether options name no SELinux context, or the one that a volume is staged with by its recorded flags. It is true if flags is empty,
// as then nothing is known.
func sameContext(flags string, options []string) bool {
	context := contextOf(mount.SplitOptions(options...))
	_, staged, known := strings.Cut(flags, ".")
	return !known || len(context) == 0 || staged == hashOf(context)
}
