package overview

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestSpread: what is said to fit does, when each volume takes the places with most room; and no more does.
func TestSpread(t *testing.T) {
	// placed is how many volumes of 1 fit: the places with most room first is what leaves most.
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
