package volume_test

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestReachedOutlived: a process keeps a device open after its claim has ended and the connection below is gone. A later claim of the node does not get that
// device: the volume is refused until the process ends. Nothing that the process has written comes to the disk, although the volume has grown meanwhile.
func TestReachedOutlived(t *testing.T) {
	p := newPair(t)
	if !p.real {
		t.Skip("what stands for NVMe/TCP ends nothing that is open")
	}
	id := p.make("v", volume.Encryption{})
	v := p.get(id)
	device, err := p.user.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	pod, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	check.OK(t, errors.Join(err, device.Close()))
	check.OK(t, second(pod.WriteAt(bytes.Repeat([]byte("before!!"), 512), 8*mib))) // into the page cache

	p.generation = 2 // of another node
	check.OK(t, p.home.Unexport(t.Context(), id, 1))
	p.gone(id)
	check.OK(t, second(p.home.Expand(t.Context(), id, volume.Range{Required: 64 * mib})))

	p.generation = 3
	everywhere := volume.NewEverywhere(p.home, p.user, away{})
	fails(t, second(everywhere.Get(t.Context(), id)), errdefs.ErrPrecondition, "a volume whose devices lead nowhere")
	again, err := p.user.AttachRaw(t.Context(), v, nil, true)
	if err == nil {
		t.Errorf("%s, which a pod of before has open, is given again", again.Path)
		check.OK(t, again.Close())
	} else {
		fails(t, err, errdefs.ErrPrecondition, "a device that somebody has open")
	}
	_, written := pod.WriteAt(bytes.Repeat([]byte("after!!!"), 512), 9*mib)
	if err := pod.Sync(); written == nil && err == nil {
		t.Error("what the pod of before writes is taken")
	}
	check.OK(t, pod.Close())
	check.OK(t, p.user.Detach(t.Context(), id))
	check.OK(t, second(everywhere.Get(t.Context(), id)))
	again, err = p.user.AttachRaw(t.Context(), p.get(id), nil, true)
	check.OK(t, errors.Join(err, again.Close()))
	if again.Size != 64*mib {
		t.Errorf("attached anew it has %d bytes", again.Size)
	}
	p.unused(id)
	if all := p.bytes(id); bytes.Contains(all, []byte("before!!")) || bytes.Contains(all, []byte("after!!!")) {
		t.Error("what the pod of before wrote is on the disk")
	}
}

// TestReachedUnstaged: a device that an interrupted stage has left over a connection that is gone, and that nobody has open, does not keep a later claim from
// using the volume.
func TestReachedUnstaged(t *testing.T) {
	p := newPair(t)
	if !p.real {
		t.Skip("what stands for NVMe/TCP ends nothing that is open")
	}
	id := p.make("v", volume.Encryption{})
	device, err := p.user.AttachRaw(t.Context(), p.get(id), nil, true)
	check.OK(t, errors.Join(err, device.Close()))
	check.OK(t, p.home.Unexport(t.Context(), id, 1))
	p.generation = 2
	p.gone(id)
	check.OK(t, second(volume.NewEverywhere(p.home, p.user, away{}).Get(t.Context(), id)))
	device, err = p.user.AttachRaw(t.Context(), p.get(id), nil, true)
	check.OK(t, err)
	check.OK(t, errors.Join(writeSynced(device.Path, []byte("anew")), device.Close()))
	p.unused(id)
	if !bytes.Contains(p.bytes(id), []byte("anew")) {
		t.Error("what was written through the new connection is not at home")
	}
}

// TestReachedTaken: the I/O of a volume's consumer goes on after another tool has cleared the kernel's target on the home, once the home exports anew.
func TestReachedTaken(t *testing.T) {
	p := newPair(t)
	if !p.real {
		t.Skip("what stands for NVMe/TCP has no other tools")
	}
	id := p.make("v", volume.Encryption{})
	device, err := p.user.AttachRaw(t.Context(), p.get(id), nil, true)
	check.OK(t, errors.Join(err, device.Close()))
	check.OK(t, writeSynced(device.Path, []byte("before")))
	drivertest.Run(t, "sh", "-ec", `cd /sys/kernel/config/nvmet
rm ports/*/subsystems/*
rmdir ports/* subsystems/*/namespaces/*
rm subsystems/*/allowed_hosts/*
rmdir subsystems/* hosts/*`) // as nvmetcli clear
	written := make(chan error, 1)
	go func() { written <- writeSynced(device.Path, []byte("after!")) }()
	p.home.RetryExports(t.Context())
	select {
	case err := <-written:
		check.OK(t, err)
	case <-time.After(time.Minute):
		t.Error("it waits still")
	}
	p.unused(id)
	if all := p.bytes(id); !bytes.HasPrefix(all, []byte("after!")) {
		t.Errorf("on the disk is %q", all[:6])
	}
}

// away is an Elsewhere by which all volumes are on another node.
type away struct{ volume.Elsewhere }

func (away) Has(volume.ID) bool { return true }
