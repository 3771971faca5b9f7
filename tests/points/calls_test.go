package points

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
)

// scenario is a call that changes something, in an environment where it can be made.
type scenario struct {
	name string
	fs   string // below the pool
	// prepare brings an environment to the state before the call.
	prepare func(w *environment) plan
}

type plan struct {
	// call makes the call, as the CO does; it can be made again.
	call func() error
	// converged makes sure that what the call is for is there.
	converged func()
	// undo is what a CO does that gives up after a failed call, if that can be: some
	// calls it makes until they succeed.
	undo func() error
}

const (
	copying = "ext4" // snapshots are copies, byte by byte
	sharing = "xfs"  // snapshots share blocks
)

// nothing is what a CO does that forgets all about a call.
func nothing() error { return nil }

var scenarios = []scenario{
	{"CreateVolume thick", copying, func(w *environment) plan { return create(w.volume("new", "ext4", 16*miB), 0) }},
	{"CreateVolume thin", copying, func(w *environment) plan {
		v := w.volume("new", "ext4", 16*miB)
		v.thin = true
		return create(v, 0)
	}},
	{"CreateVolume from snapshot, sharing", sharing, fromSnapshot},
	{"CreateVolume from snapshot, copying", copying, fromSnapshot},
	{"CreateVolume from mounted volume, sharing", sharing, fromVolume},
	{"CreateVolume from mounted volume, copying", copying, fromVolume},
	{"DeleteVolume", copying, func(w *environment) plan {
		v := filled(w, "old", "ext4")
		v.rest()
		v.content = 0
		return plan{v.delete, func() { w.listed(0) }, nothing}
	}},
	{"ControllerPublishVolume", copying, func(w *environment) plan {
		v := filled(w, "data", "ext4")
		v.rest()
		return plan{v.claim, func() { v.whole(1) }, v.release}
	}},
	{"ControllerUnpublishVolume", copying, func(w *environment) plan {
		v := filled(w, "data", "ext4")
		w.all(v.unpublishAll, v.unstage)
		return plan{v.release, func() {
			v.whole(1)
			v.rest()
		}, nil}
	}},
	{"NodeStageVolume first, ext4", copying, func(w *environment) plan { return stageFirst(w, "ext4", 16*miB) }},
	{"NodeStageVolume first, xfs", sharing, func(w *environment) plan { return stageFirst(w, "xfs", 300*miB) }},
	{"NodeStageVolume first, btrfs", copying, func(w *environment) plan { return stageFirst(w, "btrfs", 256*miB) }},
	{"NodeStageVolume later", copying, func(w *environment) plan {
		v := filled(w, "data", "ext4")
		v.rest()
		w.all(v.claim)
		return plan{v.stage, func() { v.whole(1) }, v.unstage}
	}},
	{"NodeStageVolume later, growing", copying, func(w *environment) plan {
		v := filled(w, "data", "ext4")
		v.rest()
		const larger = 300 * miB // more block groups than before
		w.all(func() error { return v.expand(larger) }, v.claim)
		return plan{v.stage, func() {
			v.size = larger
			v.rest()
			v.whole(1)
			v.shows(larger)
		}, v.unstage}
	}},
	{"NodeStageVolume later, after a power cut", copying, func(w *environment) plan {
		v := filled(w, "data", "ext4")
		var cut []byte // with a journal to replay
		v.site.bytesOf(v, func(path string) { cut = must(os.ReadFile(path))(w) })
		v.rest()
		v.site.bytesOf(v, func(path string) { check.OK(w.t, os.WriteFile(path, cut, 0)) })
		w.all(v.claim)
		return plan{v.stage, func() { v.whole(1) }, v.unstage}
	}},
	{"NodeStageVolume later, repairing", copying, func(w *environment) plan {
		v := filled(w, "data", "ext4")
		v.rest()
		v.site.bytesOf(v, func(path string) {
			drivertest.Run(w.t, "debugfs", "-w", "-R", "ssv free_blocks_count 7", path)
			drivertest.Run(w.t, "debugfs", "-w", "-R", "ssv state 2", path)
		})
		w.all(v.claim)
		return plan{v.stage, func() { v.whole(1) }, v.unstage}
	}},
	{"NodeStageVolume block", copying, func(w *environment) plan { return stageFirst(w, block, 16*miB) }},
	{"NodePublishVolume mount", copying, func(w *environment) plan { return publish(w, "ext4", false) }},
	{"NodePublishVolume mount read-only", copying, func(w *environment) plan { return publish(w, "ext4", true) }},
	{"NodePublishVolume block", copying, func(w *environment) plan { return publish(w, block, false) }},
	{"NodePublishVolume block read-only", copying, func(w *environment) plan { return publish(w, block, true) }},
	{"NodeUnpublishVolume mount", copying, func(w *environment) plan { return unpublish(w, "ext4") }},
	{"NodeUnpublishVolume block", copying, func(w *environment) plan { return unpublish(w, block) }},
	{"NodeUnstageVolume mount", copying, func(w *environment) plan { return unstage(w, "ext4") }},
	{"NodeUnstageVolume block", copying, func(w *environment) plan { return unstage(w, block) }},
	{"ControllerExpandVolume published", sharing, func(w *environment) plan {
		v := filled(w, "data", "xfs")
		const larger = 364 * miB
		return plan{func() error { return v.expand(larger) }, func() {
			v.grown(larger)
			w.all(v.nodeExpand)
			v.shows(larger)
		}, nothing}
	}},
	{"ControllerExpandVolume block", copying, func(w *environment) plan {
		v := filled(w, "data", block)
		const larger = 24 * miB
		return plan{func() error { return v.expand(larger) }, func() { v.grown(larger) }, nothing}
	}},
	{"NodeExpandVolume", sharing, func(w *environment) plan {
		v := filled(w, "data", "xfs")
		const larger = 364 * miB
		w.all(func() error { return v.expand(larger) })
		return plan{v.nodeExpand, func() { v.shows(larger) }, nothing}
	}},
	{"CreateSnapshot mounted, sharing", sharing, snapshot},
	{"CreateSnapshot mounted, copying", copying, snapshot},
	{"DeleteSnapshot", copying, func(w *environment) plan {
		id := must(filled(w, "data", "ext4").cut("cut"))(w)
		return plan{func() error { return w.RemoveSnapshot(w.ctx(), id) }, func() { w.snapshots(0) }, nothing}
	}},
	{"CreateVolumeGroupSnapshot, sharing", sharing, group},
	{"CreateVolumeGroupSnapshot, copying", copying, group},
	{"DeleteVolumeGroupSnapshot", copying, func(w *environment) plan {
		p := group(w)
		check.OK(w.t, p.call())
		return plan{p.undo, func() { w.snapshots(0) }, nothing}
	}},
	{"ControllerModifyVolume", copying, func(w *environment) plan {
		v := filled(w, "data", "ext4")
		return plan{func() error {
			_, err := w.ControllerModifyVolume(w.ctx(), &csi.ControllerModifyVolumeRequest{VolumeId: v.ID, MutableParameters: map[string]string{"readAheadKiB": "256"}})
			return err
		}, func() {
			v.readsAhead("256")
			w.all(v.unpublishAll, v.unstage)
			v.whole(1)
			v.readsAhead("256")
		}, nothing}
	}},
	{"NodePublishVolume ephemeral", copying, func(w *environment) plan {
		e := ephemeral(w)
		return plan{func() error { return e.publish("pod", false) }, func() {
			e.fill(1)
			e.holds("pod", 1)
			e.content = 0 // it goes with its pod
		}, func() error { return e.unpublish("pod") }}
	}},
	{"NodeUnpublishVolume ephemeral", copying, func(w *environment) plan {
		e := ephemeral(w)
		w.all(func() error { return e.publish("pod", false) })
		e.fill(1)
		e.content = 0
		return plan{func() error { return e.unpublish("pod") }, func() { w.listed(0) }, nil}
	}},
}

// named is the scenario of a name.
func named(name string) scenario {
	return scenarios[slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name })]
}

// must unpacks what has to succeed.
func must[T any](value T, err error) func(w *environment) T {
	return func(w *environment) T {
		w.t.Helper()
		check.OK(w.t, err)
		return value
	}
}

// filled is a volume that is up and has data 1.
func filled(w *environment, name, kind string) *vol {
	w.t.Helper()
	v := w.volume(name, kind, 16*miB)
	if kind == "xfs" {
		v.size, v.thin = 300*miB, true
	}
	w.all(v.create)
	v.up()
	v.fill(1)
	return v
}

// create a volume that holds data then.
func create(v *vol, seed uint64) plan {
	return plan{v.create, func() {
		v.content = seed
		v.whole(seed)
	}, v.delete}
}

func fromSnapshot(w *environment) plan {
	source := filled(w, "source", "ext4")
	id := must(source.cut("cut"))(w)
	source.fill(2)
	v := w.volume("restored", "ext4", 16*miB)
	v.snapshot = id
	return create(v, 1)
}

func fromVolume(w *environment) plan {
	v := w.volume("clone", "ext4", 16*miB)
	v.source = filled(w, "source", "ext4")
	return create(v, 1)
}

func stageFirst(w *environment, kind string, size int64) plan {
	v := w.volume("new", kind, size)
	v.thin = kind != "ext4" && kind != block
	w.all(v.create, v.claim)
	return plan{v.stage, func() {
		w.all(func() error { return v.publish("pod", false) })
		v.fill(1)
		w.all(v.unpublishAll, v.unstage)
		v.whole(1)
	}, v.unstage}
}

// publish at a second target; the first one is in use.
func publish(w *environment, kind string, readOnly bool) plan {
	v := filled(w, "data", kind)
	return plan{func() error { return v.publish("second", readOnly) }, func() {
		v.holds("second", 1)
		f, err := os.OpenFile(v.file("second"), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.Write(content(1).Bytes())
			err = errors.Join(err, f.Sync(), f.Close())
		}
		if (err != nil) != readOnly {
			w.t.Errorf("published with read-only %v, a write ends with %v", readOnly, err)
		}
	}, func() error { return v.unpublish("second") }}
}

func unpublish(w *environment, kind string) plan {
	v := filled(w, "data", kind)
	w.all(func() error { return v.publish("second", false) })
	return plan{func() error { return v.unpublish("second") }, func() {
		if _, err := os.Lstat(v.Target("second")); !errors.Is(err, os.ErrNotExist) {
			w.t.Errorf("%s is still there", v.Target("second"))
		}
	}, nil}
}

// detachTime is how long the kernel may take to remove a device that nobody has any more.
const detachTime = time.Minute

func unstage(w *environment, kind string) plan {
	v := filled(w, "data", kind)
	w.all(v.unpublishAll)
	return plan{v.unstage, func() {
		for deadline := time.Now().Add(detachTime); v.device() != "" && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		if device := v.device(); device != "" {
			w.t.Errorf("%s is still attached", device)
		}
		v.whole(1)
	}, nil}
}

func snapshot(w *environment) plan {
	v := filled(w, "data", "ext4")
	id := drivertest.SnapshotID("cut")
	return plan{func() error {
		_, err := v.cut("cut")
		return err
	}, func() {
		v.fill(2)
		w.restore(id, "restored", 1)
	}, func() error { return w.RemoveSnapshot(w.ctx(), id) }}
}

// restore makes sure that a snapshot holds data.
func (w *environment) restore(snapshot, name string, seed uint64) {
	w.t.Helper()
	r := w.volume(name, "ext4", 16*miB)
	r.snapshot, r.content = snapshot, seed
	w.all(r.create)
	r.whole(seed)
}

func group(w *environment) plan {
	a, b := filled(w, "a", "ext4"), filled(w, "b", "ext4")
	b.fill(2)
	var members []*csi.Snapshot
	return plan{func() error {
		group, err := w.Group(w.ctx(), "group", a.ID, b.ID)
		members = group.GetSnapshots()
		return err
	}, func() {
		a.fill(3)
		b.fill(4)
		seeds := map[string]uint64{a.ID: 1, b.ID: 2}
		listed := w.snapshots(2)
		for _, s := range listed {
			w.restore(s.GetSnapshotId(), fmt.Sprintf("restored-%d", seeds[s.GetSourceVolumeId()]), seeds[s.GetSourceVolumeId()])
		}
	}, func() error { return w.RemoveGroup(w.ctx(), drivertest.GroupID("group"), members...) }}
}

func ephemeral(w *environment) *vol {
	v := w.volume("csi-0123456789", "ext4", 16*miB)
	v.Volume = w.Inline(v.Name, v.Capability, map[string]string{"size": "16Mi"})
	return v
}

// listed makes sure that there are n volumes.
func (w *environment) listed(n int) {
	w.t.Helper()
	response, err := w.ListVolumes(w.ctx(), &csi.ListVolumesRequest{})
	check.OK(w.t, err)
	if len(response.GetEntries()) != n {
		w.t.Errorf("%d volumes are listed, not %d: %v", len(response.GetEntries()), n, response)
	}
}

// snapshots are n, and are returned.
func (w *environment) snapshots(n int) (all []*csi.Snapshot) {
	w.t.Helper()
	response, err := w.ListSnapshots(w.ctx(), &csi.ListSnapshotsRequest{})
	check.OK(w.t, err)
	for _, entry := range response.GetEntries() {
		all = append(all, entry.GetSnapshot())
	}
	if len(all) != n {
		w.t.Fatalf("%d snapshots are listed, not %d: %v", len(all), n, response)
	}
	return all
}

// Limits are kept where there are control groups version 2 with the io controller: in the virtual machine, over LVM pools.
func init() {
	if !drivertest.LimitsIO() {
		return
	}
	scenarios = append(scenarios,
		scenario{"ControllerModifyVolume limits", copying, func(w *environment) plan {
			kubepods, v := drivertest.Pods(w.t, true), filled(w, "data", "ext4")
			return plan{func() error { return v.limit("100") }, func() {
				v.limited(kubepods, "rbps=max wbps=max riops=max wiops=100")
				w.all(func() error { return v.limit("max") })
				v.limited(kubepods, "")
				v.whole(1)
			}, nothing}
		}},
		scenario{"NodePublishVolume limits", copying, func(w *environment) plan {
			kubepods, p := drivertest.Pods(w.t, false), publish(w, "ext4", false)
			v := w.volumes[0]
			w.all(func() error { return v.limit("100") })
			kubepods.SetLimits(v.number() + " wiops=max") // as it is before the first publication
			return plan{p.call, func() { v.limited(kubepods, "rbps=max wbps=max riops=max wiops=100"); p.converged() }, p.undo}
		}},
		scenario{"NodeUnstageVolume limits", copying, func(w *environment) plan {
			kubepods, p := drivertest.Pods(w.t, true), unstage(w, "ext4")
			v := w.volumes[0]
			w.all(func() error { return v.limit("100") })
			number := v.number()
			return plan{p.call, func() {
				if have := kubepods.Limits(number); have != "" {
					w.t.Errorf("unstaged, its device has %q", have)
				}
				p.converged()
			}, p.undo}
		}})
}

// Encryption needs dm-crypt: in the virtual machine.
func init() {
	if luks.Available() != nil {
		return
	}
	tasks["cryptsetup"] = "LUKS2 header"
	// encrypted has the volumes of a plan encrypted.
	encrypted := func(prepare func(w *environment) plan) func(w *environment) plan {
		return func(w *environment) plan {
			w.secret = "a passphrase"
			return prepare(w)
		}
	}
	calls := map[string]func(w *environment) plan{
		"CreateVolume from snapshot": fromSnapshot,
		"NodeStageVolume first":      func(w *environment) plan { return stageFirst(w, "ext4", 16*miB) },
		"NodeStageVolume first raw":  func(w *environment) plan { return stageFirst(w, block, 16*miB) },
		"NodeStageVolume": func(w *environment) plan {
			v := filled(w, "data", "ext4")
			w.all(v.unpublishAll, v.unstage)
			return plan{v.stage, func() { v.whole(1) }, v.unstage}
		},
		"NodeUnstageVolume": func(w *environment) plan { return unstage(w, "ext4") },
		"NodeExpandVolume": func(w *environment) plan {
			v := filled(w, "data", block)
			w.all(func() error { return v.expand(32 * miB) })
			v.size = 32 * miB
			return plan{v.nodeExpand, func() { v.grown(32 * miB) }, nothing}
		},
		"DeleteVolume": func(w *environment) plan {
			v := filled(w, "old", "ext4")
			v.rest()
			v.content = 0
			return plan{v.delete, func() { w.listed(0) }, nil}
		},
		"DeleteSnapshot": func(w *environment) plan {
			v := filled(w, "data", "ext4")
			id := must(v.cut("cut"))(w)
			return plan{func() error { return w.RemoveSnapshot(w.ctx(), id) }, func() { w.snapshots(0); v.whole(1) }, nil}
		},
	}
	for _, name := range slices.Sorted(maps.Keys(calls)) {
		scenarios = append(scenarios, scenario{name + " encrypted", copying, encrypted(calls[name])})
	}
}

// limit sets how many requests to write the volume takes in a second.
func (v *vol) limit(writes string) error {
	_, err := v.ControllerModifyVolume(v.ctx(), &csi.ControllerModifyVolumeRequest{VolumeId: v.ID, MutableParameters: map[string]string{"writeIOPS": writes}})
	return err
}

// number is that of the volume's device, as the kernel writes it.
func (v *vol) number() string { return v.sysfs("dev") }

func (v *vol) limited(kubepods *drivertest.CGroup, want string) {
	v.t.Helper()
	if have := kubepods.Limits(v.number()); have != want {
		v.t.Errorf("the device has %q, want %q", have, want)
	}
}

func (v *vol) device() string { return v.site.device(v) }

func (v *vol) sysfs(name string) string {
	v.t.Helper()
	text, err := os.ReadFile(filepath.Join("/sys/block", v.device(), name))
	check.OK(v.t, err)
	return strings.TrimSpace(string(text))
}

func (v *vol) readsAhead(want string) {
	v.t.Helper()
	if have := v.sysfs("queue/read_ahead_kb"); have != want {
		v.t.Errorf("read_ahead_kb of %s is %s, not %s", v.device(), have, want)
	}
}

// grown makes sure that the bytes and the device of a volume have a size.
func (v *vol) grown(size int64) {
	v.t.Helper()
	kept, shown := size, size
	if v.secret != "" {
		kept += luks.HeaderSize
	}
	if _, files := v.site.storage.(directory); files {
		shown = kept
	}
	v.site.bytesOf(v, func(path string) {
		f, err := os.Open(path)
		check.OK(v.t, err)
		defer f.Close()
		if have, err := f.Seek(0, io.SeekEnd); err != nil || have != kept {
			v.t.Errorf("%s has %d bytes, not %d: %v", path, have, kept, err)
		}
	})
	if sectors := v.sysfs("size"); sectors != fmt.Sprint(shown/512) {
		v.t.Errorf("the device has %s sectors, not %d", sectors, shown/512)
	}
	v.size = size
}

// shows makes sure that the filesystem has grown to a size, but for what it keeps for
// itself.
func (v *vol) shows(size int64) {
	v.t.Helper()
	var st unix.Statfs_t
	check.OK(v.t, unix.Statfs(v.Target("pod"), &st))
	if total := int64(st.Blocks) * st.Bsize; total < size-80*miB || total > size {
		v.t.Errorf("the filesystem has %d bytes on a device of %d", total, size)
	}
}
