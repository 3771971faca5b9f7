package cli

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/poolset"
)

// room is how much more can be made.
type room struct {
	Pools   []poolRoom  `json:"pools"`
	Classes []classRoom `json:"classes"`
}

// poolRoom is the room in one pool; none if the pool cannot be used, or its node is down.
type poolRoom struct {
	Node      string   `json:"node"`
	Pool      string   `json:"pool"`
	Classes   []string `json:"classes"` // the classes whose volumes may be in the pool
	Available int64    `json:"available"`
	Largest   int64    `json:"largest"` // size of the largest volume that can be made now
	Usable    bool     `json:"usable"`
}

// classRoom is the room in all pools that volumes of a StorageClass may be in.
type classRoom struct {
	Class     string `json:"class"`
	Pools     int    `json:"pools"` // number of pools with room
	Available int64  `json:"available"`
	Largest   int64  `json:"largest"`
}

func (c *commands) capacity() *cobra.Command {
	var s showing
	cmd := &cobra.Command{
		Use:   "capacity",
		Short: "Show how much more can be made, and the largest volume, by node, pool and class",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.run(cmd, func(ctx context.Context, to *screen) (any, error) {
				o, err := c.take(ctx, to.exact)
				if err != nil {
					return nil, err
				}
				r := roomOf(o)
				r.print(to)
				if len(o.Missing) > 0 {
					to.print("\n")
				}
				printMissing(to, o.Missing)
				sayMissing(cmd, to, o.Missing)
				return r, nil
			})
		},
	}
	s.add(cmd, false)
	return cmd
}

// roomOf returns how much can be made.
func roomOf(o *overview.Overview) *room {
	r := &room{Pools: []poolRoom{}, Classes: []classRoom{}}
	classes := map[string]*classRoom{}
	for _, class := range o.Classes {
		classes[class.Name] = &classRoom{Class: class.Name}
	}
	for _, n := range o.Nodes {
		for _, p := range n.Pools {
			one := poolRoom{Node: n.Name, Pool: p.Name, Classes: []string{}, Usable: n.Ready && !slices.ContainsFunc(p.Problems, unusable)}
			if one.Usable {
				one.Available, one.Largest = p.Available, p.MaxVolume
			}
			for _, class := range o.Classes {
				if !class.Allows(n.Name) || !takes(&class, &p) {
					continue
				}
				one.Classes = append(one.Classes, class.Name)
				if one.Largest > class.Header {
					classes[class.Name].Pools++
				}
			}
			r.Pools = append(r.Pools, one)
		}
	}
	for i := range o.Classes {
		class, sum := &o.Classes[i], classes[o.Classes[i].Name]
		room := roomFor(o, class)
		sum.Available, sum.Largest = room.Available, room.Largest
		r.Classes = append(r.Classes, *sum)
	}
	return r
}

// takes reports whether volumes of a class may be in a pool, by its name.
func takes(class *overview.Class, p *overview.Pool) bool {
	return poolset.Set(class.Pool).Has(p.Name) || class.Pool == "" && p.Default
}

// roomFor returns the room for volumes of a class.
func roomFor(o *overview.Overview, class *overview.Class) overview.Room {
	rooms := overview.Rooms{Replicas: max(class.Replicas, 1)}
	for _, n := range o.Nodes {
		at, is := class.Sites[n.Name]
		if class.Replicas > 1 && !is || !n.Ready {
			continue
		}
		for _, p := range n.Pools {
			if takes(class, &p) && !slices.ContainsFunc(p.Problems, unusable) {
				rooms.Add(at, overview.Room{Available: p.Available, Largest: max(p.MaxVolume-class.Header, 0)}, class.Allows(n.Name))
			}
		}
	}
	return rooms.Sum()
}

// unusable reports whether a pool with this problem has no room.
func unusable(p overview.Problem) bool { return p.Severity == overview.Inaccessible }

func (r *room) print(to *screen) {
	t := table{columns: []column{{title: "NODE", least: 12}, {title: "POOL", least: 8}, {title: "AVAILABLE", right: true}, {title: "LARGEST VOLUME", right: true}, {title: "CLASSES", least: 10, drop: 1}}}
	for _, p := range r.Pools {
		available := cell{text: Size(p.Available)}
		if !p.Usable {
			available = cell{"none: see status", red}
		}
		t.add(append(plain(p.Node, p.Pool), available, cell{text: Size(p.Largest)}, cell{text: strings.Join(p.Classes, ",")})...)
	}
	t.print(to)
	if len(r.Classes) == 0 {
		return
	}
	to.print("\n")
	t = table{columns: []column{{title: "CLASS", least: 12}, {title: "POOLS WITH ROOM", right: true}, {title: "AVAILABLE", right: true}, {title: "LARGEST VOLUME", right: true}}}
	for _, class := range r.Classes {
		t.add(plain(class.Class, strconv.Itoa(class.Pools), Size(class.Available), Size(class.Largest))...)
	}
	t.print(to)
}
