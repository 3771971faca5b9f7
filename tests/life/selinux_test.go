package life

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

const selinuxFS = "/sys/fs/selinux"

// needSELinux gives this machine's kernel the policy in the file ASHLAR_SELINUX, and enforces it. `make test-kernel` runs
// the tests that need it, in a virtual machine.
func needSELinux(t *testing.T) {
	t.Helper()
	drivertest.NeedRoot(t)
	if os.Getenv("ASHLAR_SELINUX") == "" {
		t.Skip("SELinux wants a policy for the whole kernel; make test-kernel runs this in a virtual machine")
	}
	selinux.Do(func() {
		policy, err := os.ReadFile(os.Getenv("ASHLAR_SELINUX"))
		check.OK(t, err)
		check.OK(t, unix.Mount("selinuxfs", selinuxFS, "selinuxfs", 0, ""))
		check.OK(t, os.WriteFile(selinuxFS+"/load", policy, 0o600))
		check.OK(t, os.WriteFile(selinuxFS+"/enforce", []byte("1"), 0o600))
	})
	if enforced, err := os.ReadFile(selinuxFS + "/enforce"); err != nil || string(enforced) != "1" {
		t.Fatalf("SELinux is not enforced: %q, %v", enforced, err)
	}
}

var selinux sync.Once

const (
	podA, podB = "system_u:object_r:container_file_t:s0:c1,c2", "system_u:object_r:container_file_t:s0:c1,c3"
	unlabeled  = "system_u:object_r:unlabeled_t:s0"
)

// hasContext makes sure of what SELinux says of files.
func hasContext(t *testing.T, want string, paths ...string) {
	t.Helper()
	for _, path := range paths {
		label := make([]byte, 256)
		n, err := unix.Lgetxattr(path, "security.selinux", label)
		check.OK(t, err)
		if have := strings.TrimRight(string(label[:n]), "\x00"); have != want {
			t.Errorf("%s has the label %s, want %s", path, have, want)
		}
	}
}

// as is a volume that is used with a context, as the kubelet says it: a quoted mount flag.
func (v *vol) as(context string, flags ...string) *vol {
	again := *v
	mode := v.Capability.GetAccessMode().GetMode()
	again.Capability = co.Capability(v.Capability.GetMount().GetFsType(), mode)
	if context != "" {
		flags = append(flags, `context="`+context+`"`)
	}
	again.Capability.GetMount().MountFlags = flags
	return &again
}

// TestSELinux: what CSIDriver.seLinuxMount promises. All files of a volume have the context that it is mounted with, for as
// long as it is, and none is changed for that; another context meanwhile is refused.
func TestSELinux(t *testing.T) {
	needSELinux(t)
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := startOn(t, "plain")
			v := d.made(co.Request("volume", kind, smallest[kind]))
			check.OK(t, v.claim())
			a := v.as(podA)
			check.OK(t, a.stage())
			pod, reader := v.Target("pod"), v.Target("reader")
			check.OK(t, a.publish(pod, false))
			check.OK(t, a.publish(reader, true))
			write(t, v.File(pod), 1)
			check.OK(t, os.Mkdir(filepath.Join(pod, "directory"), 0o700))
			seen := func(context string) {
				t.Helper()
				for _, at := range []string{v.Staging, pod, reader} {
					hasContext(t, context, at, filepath.Join(at, "data"), filepath.Join(at, "directory"))
				}
			}
			seen(podA)

			// Another context is refused as long as this one is mounted, whoever asks, after a restart too.
			for range 2 {
				check.OK(t, a.stage())
				check.OK(t, a.publish(pod, false))
				for _, other := range []*vol{v.as(podB), v.as("")} {
					check.Code(t, other.stage(), codes.AlreadyExists)
				}
				check.Code(t, v.as(podB).publish(v.Target("other"), false), codes.FailedPrecondition)
				absent(t, v.Target("other"))
				seen(podA)
				d = d.restart()
				v = d.volume(v.ID, v.Name, v.Capability)
				a = v.as(podA)
			}
			check.OK(t, a.expand(smallest[kind]+64*miB))
			seen(podA)
			before := changed(t, v.File(pod))

			// Beside it, a clone with another context.
			clone := d.made(co.FromVolume(co.Request("clone", kind, smallest[kind]+64*miB), v.ID))
			check.OK(t, clone.claim())
			b := clone.as(podB, "noatime")
			check.OK(t, b.stage())
			hasContext(t, podB, filepath.Join(clone.Staging, "data"))
			check.OK(t, b.unstage())
			check.OK(t, clone.release())
			check.OK(t, clone.delete())
			seen(podA)

			// Another pod's, and nobody's: nothing was written for either.
			for _, context := range []string{podB, ""} {
				check.OK(t, v.unpublish(pod))
				check.OK(t, v.unpublish(reader))
				check.OK(t, v.unstage())
				other := v.as(context)
				check.OK(t, other.stage())
				check.OK(t, other.publish(pod, false))
				check.OK(t, other.publish(reader, true))
				if context == "" {
					context = unlabeled // what has no label of its own
				}
				seen(context)
				if after := changed(t, v.File(pod)); after != before {
					t.Errorf("the file was changed at %v, not at %v", after, before)
				}
			}
			holds(t, v.File(pod), 1)
			check.OK(t, v.unpublish(reader))
			check.OK(t, v.down(pod))
			d.nothingLeft()
		})
	}
}

// changed is when the inode of a file was.
func changed(t *testing.T, path string) unix.Timespec {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(path, &st))
	return st.Ctim
}

// TestSELinuxKinds: contexts of other uses.
func TestSELinuxKinds(t *testing.T) {
	needSELinux(t)
	t.Run("for reading only", func(t *testing.T) {
		d := startOn(t, "plain")
		v := d.made(co.Request("volume", "xfs", smallest["xfs"]))
		target, err := v.as(podA).up()
		check.OK(t, err)
		write(t, v.File(target), 1)
		check.OK(t, v.unpublish(target))
		check.OK(t, v.unstage())
		check.OK(t, v.release())
		v.Capability = co.Capability("xfs", readerOnly)
		target, err = v.as(podB).up()
		check.OK(t, err)
		hasContext(t, podB, target, v.File(target))
		check.OK(t, v.down(target))
	})
	t.Run("inline ephemeral", func(t *testing.T) {
		d := startOn(t, "plain")
		v, target, r := d.inline("csi-0123", map[string]string{"size": "32Mi"})
		r.VolumeCapability.GetMount().MountFlags = []string{`noatime,context="` + podA + `"`}
		check.OK(t, d.nodePublish(r))
		hasContext(t, podA, target)
		check.OK(t, v.unpublish(target))
		d.nothingLeft()
	})
	t.Run("raw block", func(t *testing.T) { // has no mount flags, nor anything to label
		d := startOn(t, "plain")
		v := d.made(co.Request("volume", block, smallest[block]))
		target, err := v.up()
		check.OK(t, err)
		write(t, v.File(target), 1)
		check.OK(t, v.down(target))
	})
	for name, flag := range map[string]string{
		"unknown type":    `context="system_u:object_r:nothing_t:s0"`,
		"unknown level":   `context="system_u:object_r:container_file_t:s9"`,
		"nonsense":        `context="nonsense"`,
		"two contexts":    `context="` + podA + `",context="` + podB + `"`,
		"unquoted commas": `context=` + podA,
	} {
		t.Run(name, func(t *testing.T) {
			d := startOn(t, "plain")
			v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
			check.OK(t, v.claim())
			bad := v.as("")
			bad.Capability.GetMount().MountFlags = []string{flag}
			check.Code(t, bad.stage(), codes.InvalidArgument)
			good := v.as(podA)
			check.OK(t, good.stage()) // the first try did no harm
			hasContext(t, podA, v.Staging)
			check.OK(t, v.unstage())
			check.OK(t, v.release())
			check.OK(t, v.delete())
		})
	}
}
