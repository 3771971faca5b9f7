package dm_test

import (
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// TestParseMirror: texts that kernels show for a mirror, and texts that are none.
func TestParseMirror(t *testing.T) {
	leg := func(minor uint32) dm.Leg { return dm.Leg{Device: unix.Mkdev(254, minor)} }
	failed := func(minor uint32, reads bool) dm.Leg {
		return dm.Leg{Device: unix.Mkdev(254, minor), Failed: true, OnlyReads: reads}
	}
	for text, want := range map[string]dm.Mirror{
		"2 254:0 254:1 64/64 1 AA 1 core":         {Legs: []dm.Leg{leg(0), leg(1)}, Synced: 64, Total: 64},
		"2 254:0 254:1 3/64 1 AD 3 disk 7:2 A":    {Legs: []dm.Leg{leg(0), failed(1, false)}, Synced: 3, Total: 64, Logged: true},
		"2 254:0 254:1 63/64 1 SS 3 disk 7:2 A":   {Legs: []dm.Leg{failed(0, true), {Device: unix.Mkdev(254, 1), Failed: true, NotCopied: true}}, Synced: 63, Total: 64, Logged: true},
		"3 254:0 254:7 254:1 64/64 1 RAF 1 core ": {Legs: []dm.Leg{failed(0, true), leg(7), failed(1, false)}, Synced: 64, Total: 64},
	} {
		if m, err := dm.ParseMirror(text); err != nil || !reflect.DeepEqual(m, want) {
			t.Errorf("%q is %+v, %v", text, m, err)
		}
	}
	for _, text := range []string{"", "2", "x", "1 254:0 64/64 1 A 1 core", "2 254:0 254:1 64/64 1 A 1 core", "2 254:0 254:1 64/64 1 AA", "2 254:0 254 64/64 1 AA 1 core",
		"2 254:0 254:1 64 1 AA 1 core", "2 254:0 254:1 0/0 1 AA 1 core"} {
		if m, err := dm.ParseMirror(text); err == nil {
			t.Errorf("%q is taken for %+v", text, m)
		}
	}
}
