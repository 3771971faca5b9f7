package agent

import (
	"context"
	"errors"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestLocate: in which pool a node has a volume, or will have it, follows from the object, whatever was known before. Once the bytes are given back the
// object says nothing of that.
func TestLocate(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	away := lazy.New("hdd", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
	l, err := volume.NewLocal(t.Context(), "here", []blockdev.Pool{memory.NewDisk(1<<30).Open("fast", nil), away}, mounts, 0)
	check.OK(t, err)
	a := &Agent{local: l}
	for name, one := range map[string]struct {
		spec    v1alpha1.VolumeSpec
		cleared bool
		before  string // the pool that was known before
		want    string
	}{
		"in the pool of its ID":       {spec: v1alpha1.VolumeSpec{NodeName: "here", Pool: "fast"}, before: "hdd", want: "fast"},
		"in another pool":             {spec: v1alpha1.VolumeSpec{NodeName: "here", Pool: "hdd", IDPool: "fast"}, before: "fast", want: "hdd"},
		"comes to another pool":       {spec: v1alpha1.VolumeSpec{NodeName: "there", Pool: "fast", Move: &v1alpha1.Move{Node: "here", Pool: "hdd"}}, before: "fast", want: "hdd"},
		"comes to the pool of its ID": {spec: v1alpha1.VolumeSpec{NodeName: "there", Pool: "fast", Move: &v1alpha1.Move{Node: "here"}}, before: "hdd", want: "fast"},
		"has left":                    {spec: v1alpha1.VolumeSpec{NodeName: "there", Pool: "fast", Move: &v1alpha1.Move{Node: "here", Pool: "hdd", Left: true}}, before: "fast", want: "hdd"},
		"was given back":              {spec: v1alpha1.VolumeSpec{NodeName: "there", Pool: "fast", Move: &v1alpha1.Move{Node: "here", Pool: "hdd", Left: true}}, cleared: true, before: "fast", want: "fast"},
		"of another node":             {spec: v1alpha1.VolumeSpec{NodeName: "there", Pool: "hdd", IDPool: "fast"}, before: "fast", want: "fast"},
	} {
		v := &v1alpha1.Volume{Spec: one.spec, Status: v1alpha1.VolumeStatus{Move: &v1alpha1.MoveStatus{Cleared: one.cleared}}}
		v.Name = volume.KeyOf(name)
		id := cluster.VolumeID(v)
		l.Locate(id, one.before)
		a.locate(v)
		_, err := l.Get(t.Context(), id)
		if want := map[string]error{"fast": errdefs.ErrNotFound, "hdd": errdefs.ErrUnavailable}[one.want]; !errors.Is(err, want) {
			t.Errorf("%s: %v, want that of pool %s", name, err, one.want)
		}
	}
}
