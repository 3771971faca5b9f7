package store

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestFirsts: the first of what is added are kept, in whatever order that comes, and never many more.
func TestFirsts(t *testing.T) {
	for limit := range 150 {
		f := firsts[volume.ID]{id: func(id volume.ID) volume.ID { return id }, limit: limit}
		var all []volume.ID
		for _, i := range rand.Perm(5 * limit) {
			all = append(all, volume.ID{Pool: fmt.Sprint("pool-", i%3), Key: fmt.Sprintf("%04d", i)})
			if f.add(all[len(all)-1]); limit > 0 && len(f.found) > 2*limit+spare {
				t.Fatalf("%d are kept of %d, where %d are wanted", len(f.found), len(all), limit)
			}
		}
		slices.SortFunc(all, compareIDs)
		if limit > 0 {
			all = all[:limit]
		}
		if got := f.cut(); !slices.Equal(got, all) {
			t.Fatalf("%v, want %v", got, all)
		}
	}
}
