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

// Apart is the room for volumes with so many replicas: the first of each is where there is some room, and no two are in one of some places.
func (r Room) Apart(places map[string]Room, replicas int) Room {
	var available, largest []int64
	for _, place := range places {
		available, largest = append(available, place.Available), append(largest, place.Largest)
	}
	if len(places) < replicas {
		return Room{}
	}
	slices.Sort(largest)
	return Room{min(r.Available, spread(available, replicas)), min(r.Largest, largest[len(largest)-replicas])}
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
