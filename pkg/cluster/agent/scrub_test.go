package agent

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
)

// TestScrubDue: a scrub is due if one was begun, if a person asks for it, or if the last one is long ago. A volume that was never scrubbed has to be old
// enough.
func TestScrubDue(t *testing.T) {
	now := time.Now()
	ago := func(d time.Duration) *metav1.Time { return new(metav1.NewTime(now.Add(-d))) }
	for what, c := range map[string]struct {
		every  time.Duration
		scrubs int64
		scrub  *v1alpha1.Scrub
		due    bool
	}{
		"never, and new":           {2 * time.Hour, 0, nil, false},
		"never, and old":           {30 * time.Minute, 0, nil, true},
		"never, and switched off":  {0, 0, nil, false},
		"asked for":                {0, 1, nil, true},
		"asked for, and done":      {0, 1, &v1alpha1.Scrub{Asked: 1, Ended: ago(time.Hour)}, false},
		"asked for again":          {0, 2, &v1alpha1.Scrub{Asked: 1, Ended: ago(time.Hour)}, true},
		"under way":                {0, 0, &v1alpha1.Scrub{Progress: &v1alpha1.Progress{Total: 1}}, true},
		"done a short time ago":    {2 * time.Hour, 0, &v1alpha1.Scrub{Ended: ago(time.Hour)}, false},
		"done a long time ago":     {2 * time.Hour, 0, &v1alpha1.Scrub{Ended: ago(3 * time.Hour)}, true},
		"done by a clock ahead":    {2 * time.Hour, 0, &v1alpha1.Scrub{Ended: ago(-3 * time.Hour)}, true},
		"by one a little ahead":    {2 * time.Hour, 0, &v1alpha1.Scrub{Ended: ago(-time.Hour)}, false},
		"and not to be done again": {0, 0, &v1alpha1.Scrub{Ended: ago(3 * time.Hour)}, false},
	} {
		v := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: *ago(time.Hour)}, Spec: v1alpha1.ReplicatedVolumeSpec{Scrubs: c.scrubs}, Status: v1alpha1.ReplicatedVolumeStatus{Scrub: c.scrub}}
		if due := scrubDue(v, c.every, now); due != c.due {
			t.Errorf("%s: %v", what, due)
		}
	}
}

// TestDifferences: the bytes of later differences are added; only the first ranges are listed.
func TestDifferences(t *testing.T) {
	if addDifferences(nil, nil, "") != nil {
		t.Error("nothing was found, and said")
	}
	var many []dm.Range
	for i := range int64(v1alpha1.MostRanges) {
		many = append(many, dm.Range{Offset: i * 8192, Length: 4096})
	}
	first := addDifferences(nil, many[:1], "")
	all := addDifferences(first, many, "it cannot be read")
	if first.Bytes != 4096 || len(first.Ranges) != 1 || all.Bytes != (v1alpha1.MostRanges+1)*4096 || len(all.Ranges) != v1alpha1.MostRanges || all.Message != "it cannot be read" {
		t.Errorf("%+v, then %+v", first, all)
	}
}

// TestChunkAt: what cannot be read at the end of a volume is no longer than the volume.
func TestChunkAt(t *testing.T) {
	const size = 2*mirror.Chunk + 4096
	for at, want := range map[int64]int64{0: mirror.Chunk, mirror.Chunk: mirror.Chunk, 2 * mirror.Chunk: 4096} {
		if r := chunkAt(at, size); r.Offset != at || r.Length != want {
			t.Errorf("from %d on it is %+v", at, r)
		}
	}
}

// TestScrubTurns: status.scrub.turned says since when the legs differ, or are equal again, whatever else is written. Findings stay when a scrub is started
// over.
func TestScrubTurns(t *testing.T) {
	c, found := &v1alpha1.Scrub{}, &v1alpha1.Differences{Bytes: 4096}
	for _, step := range []struct {
		what          string
		edit          func()
		turns, differ bool
	}{
		{"one begins", func() { beginScrub(c, 8192, 0) }, false, false},
		{"it finds nothing", func() { c.Progress.Done = 4096 }, false, false},
		{"it finds something", func() { c.Found = found }, true, true},
		{"the volume has grown", func() { beginScrub(c, 16384, 0) }, false, true},
		{"it finds that again", func() { c.Found = found }, false, true},
		{"it ends", func() { c.Progress, c.Last, c.Found = nil, found, nil }, false, true},
		{"another one begins", func() { beginScrub(c, 16384, 1) }, false, true},
		{"it finds nothing and ends", func() { c.Progress, c.Last, c.Found = nil, nil, nil }, true, false},
	} {
		c.Turned = nil
		editAndNoteTurn(c, step.edit)
		if turned := c.Turned != nil; turned != step.turns || c.Differs() != step.differ {
			t.Errorf("%s: turned %v, differ %v", step.what, turned, c.Differs())
		}
	}
}
