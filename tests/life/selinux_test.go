package life

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

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
		ok(t, err)
		ok(t, unix.Mount("selinuxfs", selinuxFS, "selinuxfs", 0, ""))
		ok(t, os.WriteFile(selinuxFS+"/load", policy, 0o600))
		ok(t, os.WriteFile(selinuxFS+"/enforce", []byte("1"), 0o600))
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
		ok(t, err)
		if have := strings.TrimRight(string(label[:n]), "\x00"); have != want {
			t.Errorf("%s has the label %s, want %s", path, have, want)
		}
	}
}

// as is a volume that is used with a context, as the kubelet says it: a quoted mount flag.
func (v *vol) as(context string, flags ...string) *vol {
	again := *v
	mode := v.capability.GetAccessMode().GetMode()
	again.capability = capability(v.capability.GetMount().GetFsType(), mode)
	if context != "" {
		flags = append(flags, `context="`+context+`"`)
	}
	again.capability.GetMount().MountFlags = flags
	return &again
}

// TestSELinux: what CSIDriver.seLinuxMount promises. All files of a volume have the context that it is mounted with, for as
// long as it is, and none is changed for that; another context meanwhile is refused.
func TestSELinux(t *testing.T) {
	needSELinux(t)
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := startOn(t, "plain")
			v := d.made(request("volume", kind, smallest[kind]))
			ok(t, v.claim())
			a := v.as(podA)
			ok(t, a.stage())
			pod, reader := v.target("pod"), v.target("reader")
			ok(t, a.publish(pod, false))
			ok(t, a.publish(reader, true))
			write(t, v.file(pod), 1)
			ok(t, os.Mkdir(filepath.Join(pod, "folder"), 0o700))
			seen := func(context string) {
				t.Helper()
				for _, at := range []string{v.staging, pod, reader} {
					hasContext(t, context, at, filepath.Join(at, "data"), filepath.Join(at, "folder"))
				}
			}
			seen(podA)

			// Another context is refused as long as this one is mounted, whoever asks, after a restart too.
			for range 2 {
				ok(t, a.stage())
				ok(t, a.publish(pod, false))
				for _, other := range []*vol{v.as(podB), v.as("")} {
					wants(t, other.stage(), codes.AlreadyExists)
				}
				wants(t, v.as(podB).publish(v.target("other"), false), codes.FailedPrecondition)
				absent(t, v.target("other"))
				seen(podA)
				d = d.restart()
				v = d.volume(v.id, v.name, v.capability)
				a = v.as(podA)
			}
			ok(t, a.expand(smallest[kind]+64*miB))
			seen(podA)
			before := changed(t, v.file(pod))

			// Beside it, a clone with another context.
			clone := d.made(fromVolume(request("clone", kind, smallest[kind]+64*miB), v.id))
			ok(t, clone.claim())
			b := clone.as(podB, "noatime")
			ok(t, b.stage())
			hasContext(t, podB, filepath.Join(clone.staging, "data"))
			ok(t, b.unstage())
			ok(t, clone.release())
			ok(t, clone.delete())
			seen(podA)

			// Another pod's, and nobody's: nothing was written for either.
			for _, context := range []string{podB, ""} {
				ok(t, v.unpublish(pod))
				ok(t, v.unpublish(reader))
				ok(t, v.unstage())
				other := v.as(context)
				ok(t, other.stage())
				ok(t, other.publish(pod, false))
				ok(t, other.publish(reader, true))
				if context == "" {
					context = unlabeled // what has no label of its own
				}
				seen(context)
				if after := changed(t, v.file(pod)); after != before {
					t.Errorf("the file was changed at %v, not at %v", after, before)
				}
			}
			holds(t, v.file(pod), 1)
			ok(t, v.unpublish(reader))
			ok(t, v.down(pod))
			d.nothingLeft()
		})
	}
}

// changed is when the inode of a file was.
func changed(t *testing.T, path string) unix.Timespec {
	t.Helper()
	var st unix.Stat_t
	ok(t, unix.Stat(path, &st))
	return st.Ctim
}

// TestSELinuxKinds: contexts of other uses.
func TestSELinuxKinds(t *testing.T) {
	needSELinux(t)
	t.Run("for reading only", func(t *testing.T) {
		d := startOn(t, "plain")
		v := d.made(request("volume", "xfs", smallest["xfs"]))
		target, err := v.as(podA).up()
		ok(t, err)
		write(t, v.file(target), 1)
		ok(t, v.unpublish(target))
		ok(t, v.unstage())
		ok(t, v.release())
		v.capability = capability("xfs", readerOnly)
		target, err = v.as(podB).up()
		ok(t, err)
		hasContext(t, podB, target, v.file(target))
		ok(t, v.down(target))
	})
	t.Run("inline ephemeral", func(t *testing.T) {
		d := startOn(t, "plain")
		v, target, r := d.inline("csi-0123", map[string]string{"size": "32Mi"})
		r.VolumeCapability.GetMount().MountFlags = []string{`noatime,context="` + podA + `"`}
		ok(t, d.nodePublish(r))
		hasContext(t, podA, target)
		ok(t, v.unpublish(target))
		d.nothingLeft()
	})
	t.Run("raw block", func(t *testing.T) { // has no mount flags, nor anything to label
		d := startOn(t, "plain")
		v := d.made(request("volume", block, smallest[block]))
		target, err := v.up()
		ok(t, err)
		write(t, v.file(target), 1)
		ok(t, v.down(target))
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
			v := d.made(request("volume", "ext4", smallest["ext4"]))
			ok(t, v.claim())
			bad := v.as("")
			bad.capability.GetMount().MountFlags = []string{flag}
			wants(t, bad.stage(), codes.InvalidArgument)
			good := v.as(podA)
			ok(t, good.stage()) // the first try did no harm
			hasContext(t, podA, v.staging)
			ok(t, v.unstage())
			ok(t, v.release())
			ok(t, v.delete())
		})
	}
}
