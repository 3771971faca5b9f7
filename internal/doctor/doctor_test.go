package doctor

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// ending is a writer that fails after some lines.
type ending struct {
	bytes.Buffer
	left int
}

var errFull = errors.New("no space left")

func (e *ending) Write(b []byte) (int, error) {
	if e.left == 0 {
		return 0, errFull
	}
	e.left--
	return e.Buffer.Write(b)
}

// TestUnprinted: if not all lines can be printed, the result is an error, which also tells of failures.
func TestUnprinted(t *testing.T) {
	var all ending
	all.left = -1
	verdict := Run(t.Context(), &all, nil)
	if errors.Is(verdict, errFull) || !strings.Contains(all.String(), "kernel") {
		t.Fatalf("%v:\n%s", verdict, all.String())
	}
	for _, printed := range []int{0, 3} {
		some := ending{left: printed}
		err := Run(t.Context(), &some, nil)
		if !errors.Is(err, errFull) || verdict != nil && !strings.Contains(err.Error(), verdict.Error()) {
			t.Errorf("after %d lines: %v, and with all of them: %v", printed, err, verdict)
		}
		if n := strings.Count(some.String(), "\n"); n != printed {
			t.Errorf("%d lines of %d are there", n, printed)
		}
	}
}

// TestReplicated: for each thing that volumes with replicas lack, doctor says what follows and how to get it; it is no failure.
func TestReplicated(t *testing.T) {
	none := errors.New("there is none")
	for what, c := range map[string]struct {
		mirror, era error
		want, not   []string
	}{
		"all":       {nil, nil, []string{"the kernel has dm-mirror", "the kernel has dm-era"}, []string{"modprobe", "install"}},
		"no mirror": {none, nil, []string{"not without the module dm-mirror: their pods do not start here", "linux-modules-extra", "dnf install kernel-modules", "Talos", "the kernel has dm-era"}, nil},
		"no era":    {nil, none, []string{"the kernel has dm-mirror", "modprobe dm-era", "copied as a whole", "Talos has none", "kernel-modules-extra"}, nil},
	} {
		var out bytes.Buffer
		x := &examination{ctx: t.Context(), to: &out}
		x.replicated(c.mirror, c.era)
		for _, word := range c.want {
			if !strings.Contains(out.String(), word) {
				t.Errorf("%s: it does not say %q:\n%s", what, word, out.String())
			}
		}
		for _, word := range c.not {
			if strings.Contains(out.String(), word) {
				t.Errorf("%s: it says %q:\n%s", what, word, out.String())
			}
		}
		if x.failures > 0 || strings.Count(out.String(), "\n") != 2 {
			t.Errorf("%s: %d failures:\n%s", what, x.failures, out.String())
		}
	}
}
