package anynode

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
)

// TestMarks: what another node writes to a leg is marked at its home, before it is there; it stays so while the home's driver dies, and when the leg is used at home; a move leaves the marks behind.
func TestMarks(t *testing.T) {
	c := newNodes(t)
	check.OK(t, era.Available())
	v := c.create("leg", co.Block)
	o := v.object()
	before := o.DeepCopy()
	o.Spec.ReplicaOf = v.key()
	check.OK(t, c.kube.Patch(c.Context(), o, client.MergeFrom(before)))
	c.eventually("its home knows that it is a leg", func() bool { return v.says("replica.of", home) })

	first := consumers[0]
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	v.marks(first, 0)
	v.put(first, 3)
	v.marks(first, 0, 3)
	begun, err := era.Begin(v.marking())
	check.OK(t, err)
	v.put(first, 5)
	c.agents[home].Kill()
	v.put(first, 7)
	check.OK(t, c.agents[home].Start())
	v.put(first, 9)
	v.marks(first, begun, 5, 7, 9)
	v.leave(first)
	if left := v.marking(); left != "" {
		t.Errorf("%s is left", left)
	}

	v.use(home, func(string) {
		v.marks(home, begun, 5, 7, 9)
		v.put(home, 11)
		v.marks(home, begun, 5, 7, 9, 11)
	})
	v.move(first)
	v.moved(home, first)
	if files, _ := filepath.Glob(filepath.Join(c.dir, "pool-of-*", "marks", "*")); len(files) > 0 {
		t.Errorf("a move has left the marks %v", files)
	}
	v.use(first, func(string) {
		v.put(first, 1)
		v.marks(first, 1, 1)
	})
	c.again("delete it", v.of.Delete)
	c.gone()
}

// marking is the device of the kernel that marks; empty if there is none.
func (v *volume) marking() (found string) {
	v.Helper()
	names, err := dm.Names("")
	check.OK(v, err)
	for _, name := range names {
		if strings.Contains(name, v.key()) && strings.HasSuffix(name, "-marks") {
			if found != "" {
				v.Errorf("%s and %s mark", found, name)
			}
			found = name
		}
	}
	return found
}

// put writes to a block of the volume at a node, past the page cache.
func (v *volume) put(node string, at int64) {
	v.Helper()
	f, err := os.OpenFile(v.target(node), os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(v, err)
	_, err = f.WriteAt(aligned(), at*mib)
	check.OK(v, err)
	check.OK(v, f.Close())
}

// marks makes sure that just some blocks were written since an era: since 0, ever since there are marks.
func (v *volume) marks(node string, since uint32, want ...int64) {
	v.Helper()
	found, err := era.Since(v.Context(), v.marking(), max(since, 1))
	check.OK(v, err)
	var have []int64
	for _, r := range found {
		for at := r.Offset; at < r.Offset+r.Length; at += mib {
			have = append(have, at/mib)
		}
	}
	if !slices.Equal(have, want) {
		v.Errorf("used on %s, since era %d there was written %v, want %v", node, since, have, want)
	}
}
