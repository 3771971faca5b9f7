// Package cli has the commands that show an operator what there is and what is wrong: those of "kubectl ashlar" and, for the pools of one machine, those of
// "driver". They print overviews, which the program provides (Source).
package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// Source provides what the commands show.
type Source interface {
	Overview(ctx context.Context) (*overview.Overview, error)
	// Details finds out more about a volume of an overview. It may add to the volume what its node alone knows, and returns its events, the latest last, and
	// what could not be found out.
	Details(ctx context.Context, v *overview.Volume) (history []Event, missing []string, err error)
}

// Event is something that happened to a volume.
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"` // Normal or Warning
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Of      string    `json:"of"` // kind and name of the object that it is about
	Count   int       `json:"count,omitempty"`
}

// ProblemsError is the error of "status" if there are problems. These were printed already.
type ProblemsError struct{ Count int }

func (e *ProblemsError) Error() string { return fmt.Sprintf("problems: %d", e.Count) }

// ErrNoVolume is the error if no volume has the name that was given.
var ErrNoVolume = errors.New("there is no volume")

// VolumeNames are the names of a volume that commands take (Find).
const VolumeNames = "its ID (vol.POOL.KEY), the KEY alone, the name of its PersistentVolume, or NAMESPACE/CLAIM"

// VolumeHelp says in the help of a command what VOLUME is.
const VolumeHelp = "VOLUME is " + VolumeNames + "."

// The exit statuses of commands that fail; that of any other failure is 1.
const (
	StatusProblems = 2 // of "status": there are problems
	StatusNoVolume = 3 // ErrNoVolume
)

// Exit prints the error of a command in one line, and returns the exit status for it.
func Exit(program string, err error) int {
	var problems *ProblemsError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &problems):
		return StatusProblems
	}
	fmt.Fprintf(os.Stderr, "%s: %s\n", program, Lines(err.Error()))
	if errors.Is(err, ErrNoVolume) {
		return StatusNoVolume
	}
	return 1
}

// Commands returns the commands. source is called when one runs, after its flags were read. namespaced says whether the program has a flag --namespace of its
// own, which the commands then use.
func Commands(source func() (Source, error), namespaced bool) []*cobra.Command {
	c := &commands{source: source, namespaced: namespaced}
	return []*cobra.Command{c.status(), c.pools(), c.volumes(), c.describe(), c.capacity()}
}

type commands struct {
	source     func() (Source, error)
	namespaced bool
}

// formats are the values of -o.
var formats = []string{"wide", "json", "yaml"}

// format is a value of -o: one of formats, or empty.
type format string

func (f *format) String() string { return string(*f) }

// Type is what the help shows as the value.
func (f *format) Type() string { return "string" }

// Set sets the format. The mistake -output=json comes as -o with the value utput=json.
func (f *format) Set(text string) error {
	if name, _, _ := strings.Cut(text, "="); name == "utput" {
		return errors.New("write --output, with two dashes")
	}
	if text != "" && !slices.Contains(formats, text) {
		return fmt.Errorf("give one of %s", strings.Join(formats, ", "))
	}
	*f = format(text)
	return nil
}

// exact reports whether programs read the output: then texts are not changed.
func (f format) exact() bool { return f == "json" || f == "yaml" }

// every is how often --watch looks; tests wait less.
var every = 5 * time.Second

// showing is a command that shows something, with its flags.
type showing struct {
	format format
	watch  bool
}

// add adds the flags of all commands that show something.
func (s *showing) add(cmd *cobra.Command, watch bool) {
	cmd.Flags().VarP(&s.format, "output", "o", "how to print: wide, json or yaml (default: a table as wide as the terminal)")
	if watch {
		cmd.Flags().BoolVarP(&s.watch, "watch", "w", false, fmt.Sprintf("look again every %s, until it is interrupted", every))
	}
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp)) // cannot fail: the flag exists
}

// run shows something, once or again and again (--watch). show prints on the screen, and returns the value for -o json; an error besides a value is the result
// of the command. With --watch, only a first look that fails ends the command.
func (s *showing) run(cmd *cobra.Command, show func(ctx context.Context, to *screen) (any, error)) error {
	ctx := cmd.Context()
	text, status, err := s.look(cmd, show)
	if s.watch && ctx.Err() != nil {
		return nil
	}
	if err == nil {
		err = s.put(cmd, text, nil)
	}
	if !s.watch || err != nil {
		return cmp.Or(err, status)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
		next, _, failure := s.look(cmd, show)
		if ctx.Err() != nil {
			return nil
		}
		if failure == nil {
			text = next
		}
		if err := s.put(cmd, text, failure); err != nil {
			return err
		}
	}
}

// look returns the text of what is shown, and the result of the command. err is not nil if there is nothing to show.
func (s *showing) look(cmd *cobra.Command, show func(ctx context.Context, to *screen) (any, error)) (text string, status, err error) {
	to := screenOf(cmd.OutOrStdout())
	to.wide, to.exact = s.format == "wide", s.format.exact()
	var out bytes.Buffer // shown when it is complete: until then the text before stays
	to.Writer = &out
	value, err := show(cmd.Context(), to)
	if err != nil && value == nil {
		return "", nil, err
	}
	status = err
	if to.exact {
		out.Reset()
		if err := encode(&out, s.format, value); err != nil {
			return "", nil, err
		}
	}
	return out.String(), status, nil
}

// put shows the text of the last look that succeeded, and below it why the look after it failed, if it did. On a terminal with --watch it replaces what is
// shown. A file or a pipe has the text already if a look failed.
func (s *showing) put(cmd *cobra.Command, text string, failure error) error {
	to, complaint := screenOf(cmd.OutOrStdout()), ""
	if failure != nil {
		complaint = cmd.Root().DisplayName() + ": " + Lines(failure.Error()) + "\n"
	}
	switch {
	case s.watch && to.takes && to.width > 0:
		if s.format.exact() {
			to.rows = 0
		}
		text = emptied + to.first(text, complaint)
	case failure != nil:
		text = ""
	}
	if _, err := io.WriteString(to, text); err != nil {
		return err
	}
	_, err := io.WriteString(cmd.ErrOrStderr(), complaint)
	return err
}

// screen is where something is printed, with its size and what it can show.
type screen struct {
	io.Writer
	width   int  // columns; 0: no limit
	rows    int  // 0: no limit
	takes   bool // escape sequences, as to clear it
	colours bool
	wide    bool // -o wide: everything is shown
	exact   bool // what is printed here is dropped, as programs read the value
}

// screenOf returns the screen of a writer. A file or a pipe has no width and no colours.
func screenOf(w io.Writer) *screen {
	s := &screen{Writer: w}
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return s
	}
	if width, rows, err := term.GetSize(int(f.Fd())); err == nil {
		s.width, s.rows = width, rows
	}
	s.takes = os.Getenv("TERM") != "dumb"
	s.colours = s.takes && os.Getenv("NO_COLOR") == ""
	return s
}

// emptied clears a terminal, but not what has scrolled away.
const emptied = "\x1b[H\x1b[2J"

// first returns the first lines of a text that fit the screen above another text, and how many more there are. The text has the worst first.
func (s *screen) first(text, below string) string {
	lines := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n")
	rows := s.rows
	for line := range strings.Lines(below) {
		rows -= s.taken(line)
	}
	takes, fits := 0, 0 // takes: rows of the screen; fits: lines that leave one row for "... and N lines more", and one for the cursor
	for i, line := range lines {
		if takes += s.taken(line); takes <= rows-2 {
			fits = i + 1
		}
	}
	if s.rows < 3 || takes < rows {
		return text
	}
	return strings.Join(lines[:fits], "") + fmt.Sprintf("... and %d lines more\n", len(lines)-fits)
}

// taken returns how many rows of the screen a line takes. The width must not be 0.
func (s *screen) taken(line string) int {
	return 1 + max(0, utf8.RuneCountInString(control.ReplaceAllString(line, ""))-1)/s.width
}

// control matches our colours, and all other characters that a terminal takes for commands.
var control = regexp.MustCompile(`\x1b\[(?:[01]|3[123])m|[\x00-\x09\x0b-\x1f\x7f-\x{9f}]`)

// print prints to memory. Texts of others (messages, names in events) may have commands for a terminal: these are replaced.
func (s *screen) print(format string, args ...any) {
	_, _ = io.WriteString(s.Writer, control.ReplaceAllStringFunc(fmt.Sprintf(format, args...), func(found string) string {
		if len(found) > 2 {
			return found
		}
		return "?"
	}))
}

// Colours (SGR).
const (
	red    = "31"
	yellow = "33"
	green  = "32"
	bold   = "1"
)

// paint colours a text, if the screen has colours.
func (s *screen) paint(colour, text string) string {
	if !s.colours || colour == "" || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func colourOf(s overview.Severity) string {
	if s == overview.DataLoss || s == overview.Inaccessible {
		return red
	}
	return yellow
}
