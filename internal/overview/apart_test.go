package overview

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestSpread: the room is exactly what fits if each volume takes the places with most room.
func TestSpread(t *testing.T) {
	// placed returns how many volumes of size 1 fit. To take the places with most room first is best.
	placed := func(room []int64, replicas int) (n int64) {
		for room = slices.Clone(room); len(room) >= replicas; n++ {
			slices.Sort(room)
			for i := range replicas {
				if room[len(room)-1-i]--; room[len(room)-1-i] < 0 {
					return n
				}
			}
		}
		return n
	}
	for range 2000 {
		room := make([]int64, rand.IntN(6))
		for i := range room {
			room[i] = rand.Int64N(30)
		}
		replicas := 2 + rand.IntN(2)
		if have, want := spread(slices.Clone(room), replicas), placed(room, replicas); have != want {
			t.Fatalf("%d replicas in %v: %d, want %d", replicas, room, have, want)
		}
	}
}

// TestRooms: the room of each network is limited by the nodes that can have first replicas, and by the places for the others. Enough is right.
func TestRooms(t *testing.T) {
	node := func(network, place string, room int64, first bool) func(*Rooms) {
		return func(r *Rooms) { r.Add(Site{network, place}, Room{room, room}, first) }
	}
	for what, c := range map[string]struct {
		replicas int
		nodes    []func(*Rooms)
		want     Room
		enough   bool // Enough of network n
	}{
		"nothing":                                {2, nil, Room{}, true},
		"one replica":                            {1, []func(*Rooms){node("n", "a", 3, true), node("n", "a", 4, true), node("n", "b", 9, false)}, Room{7, 4}, true},
		"one place":                              {2, []func(*Rooms){node("n", "a", 3, true), node("n", "a", 9, false)}, Room{}, false},
		"another network":                        {2, []func(*Rooms){node("n", "a", 3, true), node("m", "b", 9, false)}, Room{}, false},
		"two networks":                           {2, []func(*Rooms){node("n", "a", 3, true), node("n", "b", 3, false), node("m", "a", 4, true), node("m", "b", 5, false)}, Room{7, 4}, true},
		"less elsewhere":                         {2, []func(*Rooms){node("n", "a", 3, true), node("n", "b", 2, false)}, Room{2, 2}, false},
		"beside one of the first, for the other": {2, []func(*Rooms){node("n", "a", 3, true), node("n", "b", 5, true), node("n", "a", 9, false)}, Room{5, 5}, false},
		"much elsewhere, and no node of the first": {2, []func(*Rooms){node("n", "a", 3, false), node("n", "b", 5, false)}, Room{}, true},
	} {
		r := Rooms{Replicas: c.replicas}
		for _, add := range c.nodes {
			add(&r)
		}
		if have := r.Sum(); have != c.want || r.Enough("n") != c.enough {
			t.Errorf("%s: %v, and enough is %v; want %v, %v", what, have, r.Enough("n"), c.want, c.enough)
		}
	}
	for range 2000 { // with Enough, another node changes nothing
		r := Rooms{Replicas: 2 + rand.IntN(2)}
		add := func(first bool) {
			r.Add(Site{"n", string(rune('a' + rand.IntN(6)))}, Room{rand.Int64N(30), rand.Int64N(30)}, first)
		}
		for range rand.IntN(8) {
			add(rand.IntN(2) == 0)
		}
		before, enough := r.Sum(), r.Enough("n")
		if add(false); enough && r.Sum() != before {
			t.Fatalf("%v was enough, and is %v with one more", before, r.Sum())
		}
	}
}
