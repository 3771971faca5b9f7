package overview

import (
	"math"
	"slices"
)

// Room is how many bytes of volumes can be made somewhere: together, and of one volume.
type Room struct {
	Available int64
	Largest   int64
}

// And returns the room of two places together.
func (r Room) And(other Room) Room {
	return Room{r.Available + other.Available, max(r.Largest, other.Largest)}
}

// Rooms adds up the room for volumes with a number of replicas, node by node. The first replica of each volume is on one of some nodes, the others are on any
// nodes of its network, and no two are in one place.
type Rooms struct {
	Replicas int // at least 1
	networks map[string]*network
}

// network is the room of the nodes of one network.
type network struct {
	first  Room            // of the nodes that can have first replicas
	places map[string]Room // of all nodes, by place
}

// Add adds the room of a node. first says whether it can have first replicas.
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

// Enough reports whether further nodes of a network make no difference to the sum, unless they can have first replicas.
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

// Sum returns the room of all networks.
func (r *Rooms) Sum() (all Room) {
	for _, n := range r.networks {
		all = all.And(n.apart(r.Replicas))
	}
	return all
}

// apart returns the room of a network for volumes with a number of replicas.
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

// spread returns how many bytes of volumes fit into places with so much room each, if every volume takes its size in as many places as it has replicas.
func spread(room []int64, replicas int) int64 {
	if len(room) < replicas {
		return 0
	}
	slices.Sort(room)
	rest, most := int64(0), int64(math.MaxInt64)
	for i, one := range room {
		rest += one
		if alone := len(room) - 1 - i; alone < replicas { // the places with more room have a replica of every volume
			most = min(most, rest/int64(replicas-alone))
		}
	}
	return most
}
