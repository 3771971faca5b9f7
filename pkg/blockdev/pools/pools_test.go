package pools_test

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func TestParse(t *testing.T) {
	plain := filepool.Location{Path: "/var/lib/ashlar", Overprovision: 1, ReservePercent: filepool.ReserveAuto, Create: filepool.CreateAuto}
	with := func(change func(l *filepool.Location)) pools.Location {
		l := plain
		change(&l)
		return l
	}
	lvm := func(group, thin string, change func(l *lvmpool.Location)) pools.Location {
		l := lvmpool.Location{Group: group, Thin: thin, Overprovision: 1, DataWatermark: 90, MetadataWatermark: 90}
		change(&l)
		return l
	}
	same := func(*lvmpool.Location) {}
	for text, want := range map[string]pools.Location{
		"lvm://vg0":                  lvm("vg0", "", same),
		"LVM://vg0":                  lvm("vg0", "", same),
		"lvm://vg-0.x_y+z":           lvm("vg-0.x_y+z", "", same),
		"lvm://VG0/Thin":             lvm("VG0", "Thin", same),
		"lvm://vg0?reservePercent=5": lvm("vg0", "", func(l *lvmpool.Location) { l.ReservePercent = 5 }),
		"lvm://vg0/tp?overprovision=4&reservePercent=1&dataWatermark=80&metadataWatermark=70": lvm("vg0", "tp", func(l *lvmpool.Location) {
			l.Overprovision, l.ReservePercent, l.DataWatermark, l.MetadataWatermark = 4, 1, 80, 70
		}),
		"file:///var/lib/ashlar?create=0":               with(func(l *filepool.Location) { l.Create = 0 }),
		"file:///var/lib/ashlar?create=1":               with(func(l *filepool.Location) { l.Create = 1 }),
		"file:///var/lib/ashlar?create=2":               nil,
		"file:///var/lib/ashlar?create=-1":              nil,
		"file:///var/lib/ashlar?create=0.5":             nil,
		"lvm://vg0?create=0":                            nil,
		"lvm://":                                        nil,
		"lvm:///vg0":                                    nil,
		"lvm:vg0":                                       nil,
		"lvm://vg0/":                                    nil,
		"lvm://vg0/tp/":                                 nil,
		"lvm://vg0/a/b":                                 nil,
		"lvm://vg0//tp":                                 nil,
		"lvm://../tp":                                   nil,
		"lvm://vg0/..":                                  nil,
		"lvm://vg0/.":                                   nil,
		"lvm://.":                                       nil,
		"lvm://-vg":                                     nil,
		"lvm://vg0/-tp":                                 nil,
		"lvm://vg%200":                                  nil,
		"lvm://vg0/t%20p":                               nil,
		"lvm://vg0/t%0ap":                               nil,
		"lvm://user@vg0":                                nil,
		"lvm://vg0#x":                                   nil,
		"lvm://vg0:80":                                  nil,
		"lvm://vg0/@tag":                                nil,
		"lvm://" + strings.Repeat("a", 128):             nil,
		"lvm://vg0?overprovision=2":                     nil,
		"lvm://vg0?dataWatermark=80":                    nil,
		"lvm://vg0/tp?dataWatermark=0":                  nil,
		"lvm://vg0/tp?dataWatermark=101":                nil,
		"lvm://vg0/tp?metadataWatermark=x":              nil,
		"file:///a?dataWatermark=80":                    nil,
		"file:///var/lib/ashlar":                        plain,
		"file:///var/lib/ashlar/":                       plain,
		"FILE:///var/lib/ashlar":                        plain,
		"file:///a%20b":                                 with(func(l *filepool.Location) { l.Path = "/a b" }),
		"file:///a?overprovision=1.5":                   with(func(l *filepool.Location) { l.Path, l.Overprovision = "/a", 1.5 }),
		"file:///a?reservePercent=0":                    with(func(l *filepool.Location) { l.Path, l.ReservePercent = "/a", 0 }),
		"file:///a?overprovision=100&reservePercent=90": with(func(l *filepool.Location) { l.Path, l.Overprovision, l.ReservePercent = "/a", 100, 90 }),
		"":                          nil,
		"/var/lib/ashlar":           nil,
		"file:/var/lib\x00":         nil,
		"file:///a%00b":             nil,
		"file:var/lib":              nil,
		"file://":                   nil,
		"file:///":                  nil,
		"file://var/lib/ashlar":     nil,
		"file://localhost/var":      nil,
		"file://user@/var":          nil,
		"file:///var/../etc":        nil,
		"file:///var/%2e%2e/etc":    nil,
		"file:///./var":             nil,
		"file:///var//lib":          nil,
		"file:///var/lib//":         nil,
		"file:///a#b":               nil,
		"nfs:///a":                  nil,
		"file:///a?overProvision=2": nil,
		"file:///a?overprovision=2&overprovision=3":                  nil,
		"file:///a?overprovision=":                                   nil,
		"file:///a?overprovision":                                    nil,
		"file:///a?overprovision=0.99":                               nil,
		"file:///a?overprovision=100.1":                              nil,
		"file:///a?overprovision=NaN":                                nil,
		"file:///a?overprovision=Inf":                                nil,
		"file:///a?reservePercent=-1":                                nil,
		"file:///a?reservePercent=90.5":                              nil,
		"file:///a?reservePercent=5%":                                nil,
		"file:///a?reservePercent=5;overprovision=2":                 nil,
		"file:///" + strings.Repeat("a", 10) + "?x=" + "\x7f":        nil,
		"file:///a?reservePercent=5&secret=1":                        nil,
		"file:///a?" + url.Values{"overprovision": {"two"}}.Encode(): nil,
	} {
		have, err := pools.Parse(text)
		switch {
		case want == nil && (!errors.Is(err, errdefs.ErrInvalid) || have != nil):
			t.Errorf("%q: %+v, %v; want it refused", text, have, err)
		case want != nil && (err != nil || have != want):
			t.Errorf("%q: %+v, %v; want %+v", text, have, err, want)
		}
	}
}

func TestValidPoolName(t *testing.T) {
	for name, want := range map[string]bool{
		"a": true, "0": true, "default": true, "nvme-0": true, "a--b": true, strings.Repeat("a", 24): true,
		"": false, "-": false, "a-": false, "-a": false, "A": false, "a.b": false, "a/b": false, "a_b": false, "a b": false, "ä": false, "a\n": false,
		"..": false, strings.Repeat("a", 25): false,
	} {
		if have := blockdev.ValidPoolName(name); have != want {
			t.Errorf("%q: %v, want %v", name, have, want)
		}
		if !want {
			if _, err := pools.Open(t.Context(), name, "file://"+t.TempDir()); !errors.Is(err, errdefs.ErrInvalid) {
				t.Errorf("Open of a pool named %q: %v", name, err)
			}
		}
	}
}

// FuzzParse: a URL that parses is a directory below /, has options within their limits, and parses to the same when it is written again.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"file:///var/lib/ashlar", "file:///a?overprovision=1.5&reservePercent=5", "file:///", "file:///a/../b", "file:///%2e%2e", "file:///a%2Fb",
		"file:///a%00", "file:///a?overprovision=0x1p1", "file:///a?reservePercent=1e1", "file:///a?", "file:///a#", "file:a", "://", "file:////a", "file:///a%0a",
		"lvm://vg0", "lvm://vg0/tp?dataWatermark=80", "lvm://vg0/%2e%2e", "lvm://%2d"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		have, err := pools.Parse(text)
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalid) || have != nil {
				t.Fatalf("%q: %+v, %v", text, have, err)
			}
			return
		}
		within := func(n, from, to float64) bool { return n >= from && n <= to }
		switch l := have.(type) {
		case lvmpool.Location:
			name := func(name string) bool {
				return name != "" && name != "." && name != ".." && !strings.HasPrefix(name, "-") && !strings.ContainsAny(name, " \t\n\x00%@:#?\"'\\/")
			}
			if !name(l.Group) || (l.Thin != "" && !name(l.Thin)) || !within(l.Overprovision, 1, 100) ||
				!within(l.DataWatermark, 1, 100) || !within(l.MetadataWatermark, 1, 100) || !within(l.ReservePercent, 0, 90) {
				t.Fatalf("%q: %+v", text, l)
			}
		case filepool.Location:
			if !filepath.IsAbs(l.Path) || filepath.Clean(l.Path) != l.Path || l.Path == "/" || strings.ContainsRune(l.Path, 0) ||
				!within(l.Overprovision, 1, 100) || (l.ReservePercent != filepool.ReserveAuto && !within(l.ReservePercent, 0, 90)) {
				t.Fatalf("%q: %+v", text, l)
			}
			again := url.URL{Scheme: l.Scheme(), Path: l.Path, RawQuery: fmt.Sprintf("overprovision=%v", l.Overprovision)}
			if l.ReservePercent != filepool.ReserveAuto {
				again.RawQuery += fmt.Sprintf("&reservePercent=%v", l.ReservePercent)
			}
			if l.Create != filepool.CreateAuto {
				again.RawQuery += fmt.Sprintf("&create=%v", l.Create)
			}
			if back, err := pools.Parse(again.String()); err != nil || back != pools.Location(l) {
				t.Fatalf("%q: %+v, written as %q: %+v, %v", text, l, again.String(), back, err)
			}
		default:
			t.Fatalf("%q: %+v", text, l)
		}
	})
}
