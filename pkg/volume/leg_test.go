package volume

import (
	"errors"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLegState: the state in the record of a leg is read as it was written, also if an older version wrote it, without Common and lists. ErrDataLoss for a text
// that is not understood.
func TestLegState(t *testing.T) {
	for label, want := range map[string]LegState{
		"":                     {Closed: true},
		"3:4:open:":            {Sound: 3, Opened: 4},
		"4:4:closed:0a-1b":     {Sound: 4, Opened: 4, Closed: true, Boot: "0a-1b"},
		"4:4:open:0a:QX7:4294": {Sound: 4, Opened: 4, Boot: "0a", Common: "QX7", Era: 4294},

		"4:4:open:0a:list.7.2":                {Sound: 4, Opened: 4, Boot: "0a", List: 7, Listed: 2},
		"4:4:open:0a:due.8":                   {Sound: 4, Opened: 4, Boot: "0a", Due: 8, After: 7},
		"4:4:open:0a:list.7.2:more.8":         {Sound: 4, Opened: 4, Boot: "0a", List: 7, Listed: 2, Due: 8, After: 7, More: true},
		"4:4:open:0a:list.5.2:due.8.6":        {Sound: 4, Opened: 4, Boot: "0a", List: 5, Listed: 2, Due: 8, After: 6},
		"4:4:open:0a:QX7:4294:list.7.1:due.8": {Sound: 4, Opened: 4, Boot: "0a", Common: "QX7", Era: 4294, List: 7, Listed: 1, Due: 8, After: 7},
	} {
		have, err := legStateOf(blockdev.Record{Labels: map[string]string{labelLeg: label}})
		if err != nil || have != want {
			t.Errorf("%q: %+v, %v, want %+v", label, have, err, want)
		}
		if label != "" && want.label() != label {
			t.Errorf("%+v is %q, want %q", want, want.label(), label)
		}
	}
	for _, label := range []string{"4:4:open", "4:4:ajar:", "4:4:open:0a:QX7", "4:4:open:0a:qx7:1", "4:4:open:0a:QX7:4294967296", "9223372036854775808:4:open:", "4:4:open:0a:list.7", "4:4:open:0a:due.8.", "4:4:open:0a:due.9223372036854775808"} {
		if have, err := legStateOf(blockdev.Record{Labels: map[string]string{labelLeg: label}}); !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("%q: %+v, %v", label, have, err)
		}
	}
}

// TestNoEra: since NoEra all of a leg counts as written, however often its marks were begun.
func TestNoEra(t *testing.T) {
	for begun := uint32(1); begun < 1<<(32-eraBits); begun++ {
		if since, known := (marking{begun: begun, block: 1 << 20}).era(NoEra); known {
			t.Fatalf("since it what was marked since %d counts, of marks that were begun %d times", since, begun)
		}
	}
}
