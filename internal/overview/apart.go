package overview

import (
	"math"
	"slices"
)

// Room is how much can be made somewhere, in bytes: together, and of one volume.
type Room struct {
	Available int64
	Largest   int64
}

// And is the room of two places together.
func (r Room) And(other Room) Room {
	return Room{r.Available + other.Available, max(r.Largest, other.Largest)}
}

// Rooms adds up the room for volumes with so many replicas, node by node: the first of each volume is on one of some nodes, the others are anywhere else in
// its network, and no two are in one place.
type Rooms struct {
	Replicas int // at least 1
	networks map[string]*network
}

// network is what nodes that reach each other have room for.
type network struct {
	first  Room            // of the nodes that may have the first replica
	places map[string]Room // of all nodes
}

// Add adds what there is on a node. first: it may have the first replica of a volume.
func (r *Rooms) Add(at Site, room Room, first bool) {
	if r.networks == nil {
		r.networks = map[string]*network{}
	}
	n := r.networks[at.Network]
	if n == nil {
		n = &network{places: map[string]Room{}}
		r.networks[at.Network] = n
	}
	if n.places[at.Name] = n.places[at.Name].And(room); first {
		n.first = n.first.And(room)
	}
}

// Enough reports whether more nodes in a network, none of them for a first replica, would make no difference to the sum.
func (r *Rooms) Enough(network string) bool {
	n := r.networks[network]
	if n == nil || n.first == (Room{}) {
		return true
	}
	enough := 0
	for _, place := range n.places {
		if place.Available >= n.first.Available && place.Largest >= n.first.Largest {
			enough++
		}
	}
	return enough >= r.Replicas
}

// Sum is the room that there is in all.
func (r *Rooms) Sum() (all Room) {
	for _, n := range r.networks {
		all = all.And(n.apart(r.Replicas))
	}
	return all
}

// apart is the room in a network for volumes with so many replicas.
func (n *network) apart(replicas int) Room {
	if len(n.places) < replicas {
		return Room{}
	}
	var available, largest []int64
	for _, place := range n.places {
		available, largest = append(available, place.Available), append(largest, place.Largest)
	}
	slices.Sort(largest)
	return Room{min(n.first.Available, spread(available, replicas)), min(n.first.Largest, largest[len(largest)-replicas])}
}

// spread is how much there can be of volumes that take as much in each of so many places, of which each has so much room: no place has more than one replica of a volume.
func spread(room []int64, replicas int) int64 {
	if len(room) < replicas {
		return 0
	}
	slices.Sort(room)
	rest, most := int64(0), int64(math.MaxInt64)
	for i, one := range room {
		rest += one
		if alone := len(room) - 1 - i; alone < replicas { // places that have so much that each volume has a replica there
			most = min(most, rest/int64(replicas-alone))
		}
	}
	return most
}
