package doctor

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// ending is a writer whose first so many lines can be written.
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

// TestUnprinted: who does not see all of it is not told that all is well; that there are failures is said in any case.
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
