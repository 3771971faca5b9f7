package lvmpool

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

var unitRef = blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}

func sameRecord(a, b blockdev.Record) bool {
	return a.Ref == b.Ref && a.Name == b.Name && a.Size == b.Size && a.Origin == b.Origin && a.Created.Equal(b.Created) && a.Ready == b.Ready && maps.Equal(a.Labels, b.Labels)
}

// TestTags: a record is read from its tags as it was written, and lvm2 takes the tags.
func TestTags(t *testing.T) {
	for _, r := range []blockdev.Record{
		{Ref: unitRef, Name: "pvc-1", Size: 4096, Created: time.Unix(1, 5).UTC()},
		{Ref: unitRef, Name: "ä \"b'c\\,@{}!!=%\x00\n\xff", Size: blockdev.MaxSize, Created: time.Now(), Origin: blockdev.Ref{Kind: blockdev.Snapshot, Key: strings.Repeat("0", 32)},
			Labels: map[string]string{"": "", "a.b/c": "=", "fs": "ext4", "Ü=!": "@tag,", "x": strings.Repeat("!", 300)}},
	} {
		for _, st := range []catalog.State{catalog.Ready, catalog.Creating, catalog.Deleting} {
			tags, err := tagsOf(r, st)
			if err != nil {
				t.Fatal(err)
			}
			for _, tag := range tags {
				if !lvm2.Takes(tag) || strings.ContainsAny(tag, "@,%|") || len(tag) > maxTag {
					t.Errorf("tag %q", tag)
				}
			}
			want := r
			want.Ready = st == catalog.Ready
			slices.Reverse(tags) // in any order, and with others' tags between
			have, haveState, err := parseTags(unitRef, append([]string{"others", "ashlarish=1"}, tags...))
			if err != nil || haveState != st || !sameRecord(have, want) {
				t.Errorf("%+v, %s, %v; want %+v, %s", have, haveState, err, want, st)
			}
		}
	}
}

func TestTagLimits(t *testing.T) {
	r := blockdev.Record{Ref: unitRef, Name: strings.Repeat("a", maxTag-len(tagName)), Size: 4096}
	if _, err := tagsOf(r, catalog.Ready); err != nil {
		t.Error(err)
	}
	r.Name += "a"
	if _, err := tagsOf(r, catalog.Ready); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("a tag that is too long: %v", err)
	}
	r.Name, r.Labels = "a", map[string]string{}
	for i := range maxTags {
		r.Labels[fmt.Sprint(i)] = ""
	}
	if _, err := tagsOf(r, catalog.Ready); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("too many tags: %v", err)
	}
	// A record with the most tags fits into the longest command.
	if words := len(strings.Fields("lvcreate -n NAME -ay -K -ky -V SIZE --thinpool POOL GROUP")) + maxTags; words > lvm2.MaxWords {
		t.Errorf("%d words, %d are the most", words, lvm2.MaxWords)
	}
}

func TestParseTagsIsStrict(t *testing.T) {
	good := []string{"ashlar", "ashlar.name=a", "ashlar.size=4096", "ashlar.created=2026-01-02T15:04:05Z"}
	if _, _, err := parseTags(unitRef, good); err != nil {
		t.Fatal(err)
	}
	for i := range good {
		if _, _, err := parseTags(unitRef, slices.Delete(slices.Clone(good), i, i+1)); !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("without %s: %v", good[i], err)
		}
		if _, _, err := parseTags(unitRef, append(slices.Clone(good), good[i]+"0")); !errors.Is(err, errdefs.ErrDataLoss) && i > 0 {
			t.Errorf("twice %s: %v", good[i], err)
		}
	}
	for _, bad := range []string{"ashlar.size=0", "ashlar.size=-4096", "ashlar.size=", "ashlar.size=1e3", "ashlar.size=99999999999999999999", fmt.Sprint("ashlar.size=", int64(blockdev.MaxSize)+1),
		"ashlar.created=yesterday", "ashlar.created=", "ashlar.name=!", "ashlar.name=!g0", "ashlar.name=a!0"} {
		key, _, _ := strings.Cut(bad, "=")
		tags := slices.DeleteFunc(slices.Clone(good), func(tag string) bool { return strings.HasPrefix(tag, key+"=") })
		if _, _, err := parseTags(unitRef, append(tags, bad)); !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, bad := range []string{"ashlar.state=ready", "ashlar.state=", "ashlar.origin=", "ashlar.origin=vol.x", "ashlar.origin=vol.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "ashlar.origin=../" + strings.Repeat("a", 32),
		"ashlar.unknown=1", "ashlar.label=1", "ashlar.", "ashlar.label.!=1", "ashlar.label.x=!"} {
		if _, _, err := parseTags(unitRef, append(slices.Clone(good), bad)); !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// FuzzTags: any text that is written is read as it was, and any tags that are read would be written so again.
func FuzzTags(f *testing.F) {
	f.Add("pvc-1", "fs", "ext4", "ashlar.name=a!20b")
	f.Add("", "=", "!", "ashlar.label.!3d=!")
	f.Add("\x00\xff", "a.b", "@,", "ashlar.size=0x10")
	f.Fuzz(func(t *testing.T, name, key, value, tag string) {
		r := blockdev.Record{Ref: unitRef, Name: name, Size: 4096, Created: time.Unix(7, 0).UTC(), Labels: map[string]string{key: value}, Ready: true}
		tags, err := tagsOf(r, catalog.Ready)
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		if have, _, err := parseTags(unitRef, tags); err != nil || !sameRecord(have, r) {
			t.Fatalf("%+v, %v; want %+v", have, err, r)
		}
		have, st, err := parseTags(unitRef, append(tags, tag))
		if err != nil {
			if !errors.Is(err, errdefs.ErrDataLoss) {
				t.Fatal(err)
			}
			return
		}
		again, err := tagsOf(have, st)
		if errors.Is(err, errdefs.ErrInvalid) {
			return // it is too long
		}
		if back, _, err2 := parseTags(unitRef, again); err != nil || err2 != nil || !sameRecord(back, have) {
			t.Fatalf("%+v, %v, %v; want %+v", back, err, err2, have)
		}
	})
}

func TestChangeTags(t *testing.T) {
	have := changeTags([]string{"a", "b"}, []string{"b", "c"})
	if want := []string{"--deltag=a", "--addtag=c"}; !slices.Equal(have, want) {
		t.Errorf("%q, want %q", have, want)
	}
	if have := changeTags([]string{"a"}, []string{"a"}); len(have) > 0 {
		t.Errorf("%q", have)
	}
}

func TestLeftover(t *testing.T) {
	key := strings.Repeat("0", 32)
	for name, want := range map[string]bool{"grow." + key: true, "cut.vol." + key: true, "cut.snap." + key: true,
		"grow.": false, "grow.x": false, "cut." + key: false, "cut.pool." + key: false, "vol." + key: false, "cut.vol." + key + "0": false, "": false} {
		if have := leftover(name); have != want {
			t.Errorf("%q: %v", name, have)
		}
	}
}

func TestParseThinUse(t *testing.T) {
	for status, want := range map[string]thinUse{
		"0 10/1024 100/1000 - rw discard_passdown queue_if_no_space - 1024":                   {data: 10, metadata: 10 * 100.0 / 1024, mode: "rw"},
		"7 1024/1024 1000/1000 5 out_of_data_space discard_passdown error_if_no_space - 1024": {data: 100, metadata: 100, mode: "out_of_data_space", transaction: 7, held: true},
		"7 1/1024 1/1000 - ro no_discard_passdown queue_if_no_space needs_check 1024":         {data: 0.1, metadata: 100.0 / 1024, mode: "ro", fault: "needs_check", transaction: 7},
		"Fail":              {mode: "ro", fault: "Fail"},
		"Error":             {mode: "ro", fault: "Error"},
		"1 x/y 1/0 - rw":    {data: 100, metadata: 100, mode: "rw", transaction: 1},
		"1 1/100 5/10 - rw": {data: 50, metadata: 1, mode: "rw", transaction: 1},
	} {
		if have, err := parseThinUse(status); err != nil || have != want {
			t.Errorf("%q: %+v, %v; want %+v", status, have, err, want)
		}
	}
	for use, want := range map[thinUse]bool{{mode: "rw"}: false, {mode: "out_of_data_space"}: false, {mode: "ro"}: true, {mode: "rw", fault: "needs_check"}: true} {
		if use.failed() != want {
			t.Errorf("%+v failed: %v", use, !want)
		}
	}
	p := &pool{location: Location{Group: "group", Thin: "thin", DataWatermark: 90, MetadataWatermark: 90}}
	for status, want := range map[string]string{
		"7 461/512 100/1000 - rw discard_passdown queue_if_no_space - 51":          "lvextend --poolmetadatasize",
		"7 512/512 100/1000 - ro discard_passdown queue_if_no_space - 51":          "lvextend --poolmetadatasize +1G group/thin",
		"7 512/512 100/1000 - ro discard_passdown queue_if_no_space needs_check 1": "lvconvert --repair",
		"7 100/512 100/1000 - ro discard_passdown queue_if_no_space - 51":          "lvconvert --repair",
		"Fail": "lvconvert --repair",
	} {
		use, err := parseThinUse(status)
		if full := p.full(use); err != nil || !strings.Contains(full, want) {
			t.Errorf("%q: %q, %v; want %q", status, full, err, want)
		}
	}
	for _, status := range []string{"", "1 2 3", "0 1/2 3/4 -", "x 1/2 3/4 - rw"} {
		if use, err := parseThinUse(status); err == nil || !strings.Contains(err.Error(), strconv.Quote(status)) {
			t.Errorf("%q: %+v, %v", status, use, err)
		}
	}
}
