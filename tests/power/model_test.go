package power

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/ashlar-csi/ashlar/internal/co"
)

// verb is what a step does.
type verb string

const (
	create   verb = "create"   // a volume; of: from what
	up       verb = "up"       // claim, stage, publish
	fill     verb = "fill"     // blocks, and fsync
	expand   verb = "expand"   // to a size
	down     verb = "down"     // unpublish, unstage, release
	remove   verb = "remove"   // a volume
	snapshot verb = "snapshot" // of a volume
	forget   verb = "forget"   // a snapshot
	together verb = "together" // a group snapshot of members
	disband  verb = "disband"  // a group snapshot
)

// step is one thing that a CO, or the user of a volume, does.
type step struct {
	verb    verb
	name    string
	of      string   // the volume or snapshot that it is made from
	members []string // of a group
	kind    string   // of a new volume: its filesystem, or block
	size    int64
	blocks  []int64 // to fill, of blockSize bytes
	seed    uint64
}

func (s step) String() string { return fmt.Sprintf("%s %s", s.verb, s.name) }

const (
	block     = co.Block
	blockSize = 4096
	fileSize  = 4 * miB // of the file that a filesystem holds its blocks in
)

// stamp says by whom, and when, a block was written.
type stamp struct {
	volume string
	seed   uint64
}

// vol is a volume as its user knows it.
type vol struct {
	name, kind string
	size       int64
	up         bool
	data       map[int64]stamp // by number of the block; the others are zeros
	maybe      map[int64]stamp // what was being written when the power went
	identity   any             // of its filesystem, once that is known
}

// snap is a snapshot.
type snap struct {
	vol
	of, group string
}

// model is all that was promised.
type model struct {
	volumes   map[string]*vol
	snapshots map[string]*snap // those of groups are named GROUP/VOLUME
}

func newModel() *model { return &model{map[string]*vol{}, map[string]*snap{}} }

// after returns what was promised when the OK of the last of some steps had been given.
func after(steps []event) *model {
	m := newModel()
	for _, e := range steps {
		m.apply(e.step)
		if v := m.volumes[e.name]; v != nil && e.identity != nil {
			v.identity = e.identity
		}
	}
	return m
}

// event is a step that was done.
type event struct {
	step
	identity any // of the filesystem that came up
}

func (m *model) apply(s step) {
	switch s.verb {
	case create:
		v := &vol{name: s.name, kind: s.kind, size: s.size, data: map[int64]stamp{}}
		if source := m.volumes[s.of]; source != nil {
			v.data, v.identity = maps.Clone(source.data), source.identity
		} else if source := m.snapshots[s.of]; source != nil {
			v.data, v.identity = maps.Clone(source.data), source.identity
		}
		m.volumes[s.name] = v
	case up, down:
		m.volumes[s.name].up = s.verb == up
	case fill:
		for _, b := range s.blocks {
			m.volumes[s.name].data[b] = stamp{s.name, s.seed}
		}
	case expand:
		m.volumes[s.name].size = s.size
	case remove:
		delete(m.volumes, s.name)
	case snapshot:
		m.cut(s.name, s.of, "")
	case forget:
		delete(m.snapshots, s.name)
	case together:
		for _, member := range s.members {
			m.cut(s.name+"/"+member, member, s.name)
		}
	case disband:
		maps.DeleteFunc(m.snapshots, func(_ string, one *snap) bool { return one.group == s.name })
	}
}

func (m *model) cut(name, of, group string) {
	one := &snap{vol: *m.volumes[of], of: of, group: group}
	one.data, one.up = maps.Clone(one.data), false
	m.snapshots[name] = one
}

// lives returns the steps of a volume with a filesystem and of what is made from it, and those
// of raw ones.
func lives(random *rand.Rand) [][]step {
	filling := func(name string, from, to int64) step {
		s := step{verb: fill, name: name, seed: random.Uint64()}
		for range 1 + random.IntN(12) {
			s.blocks = append(s.blocks, from/blockSize+random.Int64N((to-from)/blockSize))
		}
		slices.Sort(s.blocks)
		s.blocks = slices.Compact(s.blocks)
		return s
	}
	made := func(name, of, kind string, size int64) step {
		return step{verb: create, name: name, of: of, kind: kind, size: size}
	}
	do := func(v verb, name string) step { return step{verb: v, name: name} }
	cut := func(name, of string) step { return step{verb: snapshot, name: name, of: of} }
	grow := func(name string, size int64) step { return step{verb: expand, name: name, size: size} }
	return [][]step{{
		made("fs", "", "ext4", 16*miB), do(up, "fs"), filling("fs", 0, fileSize), filling("fs", 0, fileSize),
		cut("cut", "fs"), filling("fs", 0, fileSize), grow("fs", 24*miB), filling("fs", 0, fileSize),
		made("clone", "fs", "ext4", 24*miB), do(up, "clone"), filling("clone", 0, fileSize),
		made("restore", "cut", "ext4", 16*miB), do(up, "restore"), do(down, "fs"), filling("restore", 0, fileSize),
		do(forget, "cut"), do(down, "clone"), do(remove, "clone"), do(up, "fs"), filling("fs", 0, fileSize),
	}, {
		made("raw", "", block, 8*miB), do(up, "raw"), filling("raw", 0, 8*miB), made("other", "", block, 8*miB), do(up, "other"),
		filling("other", 0, 8*miB), {verb: together, name: "both", members: []string{"raw", "other"}}, filling("raw", 0, 8*miB),
		filling("other", 0, 8*miB), cut("raw-cut", "raw"), grow("raw", 12*miB), filling("raw", 8*miB, 12*miB), do(disband, "both"),
		made("again", "raw-cut", block, 12*miB), do(up, "again"), do(down, "raw"), do(remove, "raw"), filling("again", 0, 12*miB),
		do(forget, "raw-cut"), made("new", "", block, 8*miB), do(up, "new"), filling("new", 0, 8*miB),
	}}
}

// interleaved makes one line of several, each in its order, and takes all volumes down in the
// end.
func interleaved(lines [][]step, random *rand.Rand) []step {
	var all []step
	for len(lines) > 0 {
		i := random.IntN(len(lines))
		all, lines[i] = append(all, lines[i][0]), lines[i][1:]
		if len(lines[i]) == 0 {
			lines = slices.Delete(lines, i, i+1)
		}
	}
	m := newModel()
	for _, s := range all {
		m.apply(s)
	}
	for _, name := range slices.Sorted(maps.Keys(m.volumes)) {
		if m.volumes[name].up {
			all = append(all, step{verb: down, name: name})
		}
	}
	return all
}
