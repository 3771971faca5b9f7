package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// description is what describe shows of a volume.
type description struct {
	Volume    overview.Volume     `json:"volume"`
	Snapshots []overview.Snapshot `json:"snapshots"`
	Node      []overview.Problem  `json:"nodeProblems"` // of the nodes that have its bytes
	Pool      []overview.Problem  `json:"poolProblems"` // of the pools that have its bytes
	History   []Event             `json:"history"`
	Missing   []string            `json:"missing,omitempty"`

	elsewhere bool // a replica that is current is on a node and in a pool that are well, so the others make it no worse than degraded
}

func (c *commands) describe() *cobra.Command {
	var s showing
	cmd := &cobra.Command{
		Use:   "describe VOLUME",
		Short: "Show all of one volume: claim, pods, node, device, snapshots, history, problems",
		Long:  "describe shows all that is known of one volume, on one page.\n\n" + VolumeHelp,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("give one volume: " + VolumeNames)
			}
			return nil
		},
		ValidArgsFunction: c.complete(func(o *overview.Overview) (names []string) {
			for i := range o.Volumes {
				names = append(names, NamesOf(&o.Volumes[i])...)
			}
			return names
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.run(cmd, func(ctx context.Context, to *screen) (any, error) {
				source, err := c.source()
				if err != nil {
					return nil, err
				}
				d, now, err := find(ctx, source, args[0])
				if err != nil {
					return nil, err
				}
				if !to.exact {
					plainly(d)
				}
				d.print(to, now)
				return d, nil
			})
		},
	}
	s.add(cmd, true)
	return cmd
}

// NamesOf returns the names of a volume, besides its key.
func NamesOf(v *overview.Volume) []string {
	names := []string{v.ID, v.Name}
	if v.PersistentVolume != "" {
		names = append(names, v.PersistentVolume)
	}
	if v.Claim != nil {
		names = append(names, v.Claim.Namespace+"/"+v.Claim.Name)
	}
	return names
}

// keyOf returns the last part of an ID; in a cluster it is the name of the object.
func keyOf(id string) string { return id[strings.LastIndexByte(id, '.')+1:] }

// notThere returns the error for a name that no volume has: ErrNoVolume, or another one if a snapshot or replica has that name, or a pool of this machine
// cannot be read.
func notThere(o *overview.Overview, name string) error {
	for _, s := range o.Snapshots {
		if name == s.ID || name == s.Name || name == keyOf(s.ID) {
			return fmt.Errorf("%q is a snapshot; its volume is %s, whose description has it", name, s.Source)
		}
	}
	for i := range o.Volumes {
		v := &o.Volumes[i]
		if r := v.Replicas; r != nil && slices.ContainsFunc(r.Legs, func(leg overview.Leg) bool { return name == leg.ID || name == keyOf(leg.ID) }) {
			return fmt.Errorf("%q is a replica of volume %s (%s); give that, its description has all of them", name, Title(v), v.ID)
		}
	}
	for _, n := range o.Nodes {
		for _, p := range n.Pools {
			if !o.Cluster && slices.ContainsFunc(p.Problems, unusable) {
				return fmt.Errorf("no volume %q is known, and pool %s cannot be asked: %s", name, p.Name, p.Problems[0].Message)
			}
		}
	}
	return fmt.Errorf("%w %q; give %s (volumes lists them)", ErrNoVolume, name, VolumeNames)
}

// Find returns the volume that a name is for: its ID, key, CSI name, PersistentVolume, or NAMESPACE/CLAIM. It is an error if none has the name (ErrNoVolume),
// or several have.
func Find(o *overview.Overview, name string) (*overview.Volume, error) {
	var found []*overview.Volume
	for i := range o.Volumes {
		if v := &o.Volumes[i]; slices.Contains(NamesOf(v), name) || name == keyOf(v.ID) {
			found = append(found, v)
		}
	}
	switch {
	case len(found) == 0:
		return nil, notThere(o, name)
	case len(found) > 1: // a volume was kept, and another one made for a new claim of that name
		var ids []string
		for _, v := range found {
			ids = append(ids, v.ID)
		}
		return nil, fmt.Errorf("%q is the name of %d volumes; give the ID of one: %s", name, len(found), strings.Join(ids, ", "))
	}
	return found[0], nil
}

// find returns the description of the volume with a name, and the time of the overview.
func find(ctx context.Context, source Source, name string) (*description, time.Time, error) {
	o, err := source.Overview(ctx)
	if err != nil {
		return nil, time.Time{}, err
	}
	found, err := Find(o, name)
	use := slices.IndexFunc(o.Uses, func(u overview.Use) bool { return u.Key == keyOf(name) || err == nil && u.Key == keyOf(found.ID) })
	if err != nil && use < 0 {
		return nil, o.Taken, err
	}
	if err != nil { // only its devices are known here; the nodes that have it know the rest
		found = &overview.Volume{ID: name, Name: name}
	}
	if use >= 0 {
		found.Devices, found.Mounts = o.Uses[use].Devices, o.Uses[use].Mounts
	}
	d := &description{Volume: *found, Missing: o.Missing, Snapshots: []overview.Snapshot{}, Node: []overview.Problem{}, Pool: []overview.Problem{}}
	for _, s := range o.Snapshots {
		if s.Source == d.Volume.ID {
			d.Snapshots = append(d.Snapshots, s)
		}
	}
	places := o.Places()
	for _, node := range d.Volume.On() {
		d.Node = append(d.Node, places[overview.Subject{Kind: overview.KindNode, Name: node}]...)
	}
	for _, p := range d.Volume.Places() {
		d.Pool = append(d.Pool, places[overview.Subject{Kind: overview.KindPool, Name: overview.PoolName(p.Node, p.Pool)}]...)
	}
	d.elsewhere = d.Volume.Replicas != nil && len(places.Of(&d.Volume)) == len(d.Volume.Problems)
	var missing []string
	d.History, missing, err = source.Details(ctx, &d.Volume)
	d.Missing = append(d.Missing, missing...)
	return d, o.Taken, err
}

// print prints the description, problems first.
func (d *description) print(to *screen, now time.Time) {
	v := &d.Volume
	to.print("%s\n\n", to.paint(bold, "Volume "+Title(v)))
	for _, p := range append(append(append([]overview.Problem{}, v.Problems...), d.Pool...), d.Node...) {
		severity, of := p.Severity, ""
		if p.Subject.Kind != overview.KindVolume {
			of = strings.ToLower(p.Subject.Kind) + " " + p.Subject.Name + ": "
			if d.elsewhere && overview.Worse(severity, overview.Degraded) < 0 {
				severity = overview.Degraded
			}
		}
		to.print("%s\n", to.paint(colourOf(severity), fmt.Sprintf("%s: %s", severity, p.Reason)))
		to.print("%s    See %s\n\n", wrapped(of+p.Message, "    ", to.width), p.Runbook)
	}
	d.facts(to, now)
	d.legs(to, now)
	if len(d.Snapshots) > 0 {
		to.print("\n%s\n", to.paint(bold, "Snapshots"))
		t := table{columns: []column{{title: "NAME", least: 16}, {title: "SIZE", right: true}, {title: "STATE"}, {title: "AGE", right: true}, {title: "PROBLEMS", least: 10}, {title: "ID", wide: true}}}
		for _, s := range d.Snapshots {
			t.add(append(plain(s.Name, Size(s.Size)), state(s.State, s.Progress), cell{text: age(now, s.Created)}, reasons(s.Problems), cell{text: s.ID})...)
		}
		t.print(to)
	}
	if len(d.History) > 0 {
		to.print("\n%s\n", to.paint(bold, "History"))
		for _, e := range d.History {
			colour, times := "", ""
			if e.Type == "Warning" {
				colour = yellow
			}
			if e.Count > 1 {
				times = fmt.Sprintf(" (%d times)", e.Count)
			}
			to.print("%s ago  %s  %s%s\n%s", age(now, e.Time), to.paint(colour, e.Reason), e.Of, times, wrapped(e.Message, "    ", to.width))
		}
	}
	if len(d.Missing) > 0 {
		to.print("\n")
	}
	printMissing(to, d.Missing)
}

// legs prints the replicas of a volume with replicas: where each is, its state, since when, and why it is not current.
func (d *description) legs(to *screen, now time.Time) {
	r := d.Volume.Replicas
	if r == nil {
		return
	}
	to.print("\n%s\n", to.paint(bold, fmt.Sprintf("Replicas: %d of %d current", r.Current, r.Wanted)))
	t := table{columns: []column{{title: "NODE", least: 10}, {title: "POOL", least: 7, drop: 2}, {title: "STATE"}, {title: "SINCE", right: true}, {title: "USED", right: true, drop: 3}, {title: "ID", wide: true}}}
	for _, leg := range r.Legs {
		since, used, node := "", "", leg.Node
		if leg.Since != nil {
			since = age(now, *leg.Since)
		}
		if leg.Used != nil {
			used = Size(*leg.Used)
		}
		if node != "" && node == d.Volume.Published {
			node += " (uses it)"
		}
		t.add(append(plain(node, leg.Pool), append([]cell{legState(leg)}, plain(since, used, leg.ID)...)...)...)
	}
	t.print(to)
	for _, leg := range r.Legs {
		if leg.Message != "" {
			to.print("%s", wrapped(fmt.Sprintf("replica on %s: %s", cmp.Or(leg.Node, "no node yet"), leg.Message), "    ", to.width))
		}
	}
}

// legState returns the state of a replica, and its progress.
func legState(leg overview.Leg) cell {
	c := state(overview.State(leg.State), leg.Progress)
	if c.colour == "" && leg.State != overview.LegCurrent {
		c.colour = yellow
	}
	return c
}

// facts prints the properties of a volume.
func (d *description) facts(to *screen, now time.Time) {
	v := &d.Volume
	fact := func(what, is string) {
		if is != "" {
			to.print("%-18s %s\n", what, is)
		}
	}
	fact("ID", v.ID)
	fact("Name", v.Name)
	fact("PersistentVolume", v.PersistentVolume)
	if v.Claim != nil {
		fact("Claim", v.Claim.Namespace+"/"+v.Claim.Name)
	}
	var pods []string
	for _, p := range v.Pods {
		pods = append(pods, p.Namespace+"/"+p.Name)
	}
	fact("Pods", strings.Join(pods, ", "))
	fact("State", state(v.State, v.Progress).text)
	fact("Moves", v.Moving)
	fact("Refused", v.Failure)
	fact("Is to have", v.Awaits)
	if v.Size > 0 { // 0: it is only used here, and its properties are not known
		d.what(fact, now)
	}
	fact("Devices", strings.Join(v.Devices, ", "))
	for _, m := range v.Mounts {
		fact("Mounted at", m)
	}
}

// what prints the size and other properties of a volume, and where its bytes are.
func (d *description) what(fact func(what, is string), now time.Time) {
	v := &d.Volume
	fact("Node", strings.Join(v.On(), ", "))
	fact("Pool", strings.Join(v.In(), ", "))
	fact("May be used on", v.Published)
	used, kind, carries := "", "thick", v.Filesystem
	if v.Used != nil {
		used = ", " + Size(*v.Used) + " used"
	}
	if v.Thin {
		kind = "thin"
	}
	if carries == "" {
		carries = "raw block device"
	}
	fact("Size", fmt.Sprintf("%s (%d bytes), %s%s", Size(v.Size), v.Size, kind, used))
	fact("Carries", carries)
	fact("Encrypted with", v.Encryption)
	var settings []string
	for name, value := range v.Settings {
		settings = append(settings, name+"="+value)
	}
	slices.Sort(settings)
	fact("Settings", strings.Join(settings, ", "))
	fact("Copied from", v.Source)
	fact("Made", fmt.Sprintf("%s (%s ago)", v.Created.Format(time.RFC3339), age(now, v.Created)))
}
