// Package cli is the commands that show an operator what there is and what is wrong: those of "kubectl ashlar" and, over the pools of one
// machine, of "driver". They print overviews; where these come from the program says.
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

// Source is where the commands get what they show.
type Source interface {
	Overview(ctx context.Context) (*overview.Overview, error)
	// Details finds out more of a volume of an overview: it may add to the volume what only its node knows, and returns what happened to
	// it, the latest last, and what could not be found out.
	Details(ctx context.Context, v *overview.Volume) (history []Event, missing []string, err error)
}

// Event is something that happened to a volume.
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"` // Normal or Warning
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Of      string    `json:"of"` // kind and name of what it is of
	Count   int       `json:"count,omitempty"`
}

// ProblemsError is the error of "status" where something is wrong. It was printed already.
type ProblemsError struct{ Count int }

func (e *ProblemsError) Error() string { return fmt.Sprintf("problems: %d", e.Count) }

// ErrNoVolume: no volume has the name that was given.
var ErrNoVolume = errors.New("there is no volume")

// The exit statuses of commands that failed; any other failure is 1.
const (
	StatusProblems = 2 // of "status": something is wrong
	StatusNoVolume = 3 // ErrNoVolume
)

// Exit prints the error of a command, in one line, and returns the exit status that it means.
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

// Commands returns the commands. source is asked for when one runs, after its flags were read. The flag --namespace is that of the
// program, if it has one.
func Commands(source func() (Source, error), namespaced bool) []*cobra.Command {
	c := &commands{source: source, namespaced: namespaced}
	return []*cobra.Command{c.status(), c.pools(), c.volumes(), c.describe(), c.capacity()}
}

type commands struct {
	source     func() (Source, error)
	namespaced bool
}

// formats of -o.
var formats = []string{"wide", "json", "yaml"}

// format is one of them, or empty: the value of -o.
type format string

func (f *format) String() string { return string(*f) }

// Type is what the help shows as the value.
func (f *format) Type() string { return "string" }

// Set takes a format. -output=json is read as -o with the rest as its value.
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

// exact: programs read it, so texts are as they are.
func (f format) exact() bool { return f == "json" || f == "yaml" }

// every is how long --watch waits between two looks; tests wait less.
var every = 5 * time.Second

// showing is a command that shows something, as its flags say.
type showing struct {
	format format
	watch  bool
}

// add gives a command the flags of all that show something.
func (s *showing) add(cmd *cobra.Command, watch bool) {
	cmd.Flags().VarP(&s.format, "output", "o", "how to print: wide, json or yaml (default: a table as wide as the terminal)")
	if watch {
		cmd.Flags().BoolVarP(&s.watch, "watch", "w", false, fmt.Sprintf("look again every %s, until it is interrupted", every))
	}
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp)) // the flag is there
}

// run shows something, once or again and again; show returns what -o json prints, or prints on the screen. An error beside that is the
// exit status of what was shown. Once there is a picture, a look that fails ends nothing: the next may succeed.
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

// look returns the text of what is shown, and the exit status that it means; an error if there is nothing to show.
func (s *showing) look(cmd *cobra.Command, show func(ctx context.Context, to *screen) (any, error)) (text string, status, err error) {
	to := screenOf(cmd.OutOrStdout())
	to.wide, to.exact = s.format == "wide", s.format.exact()
	var out bytes.Buffer // shown once it is complete: until then the look before stays
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

// put shows the text of the last look that succeeded, on a terminal in place of what is there; and why the look after it failed, if it did,
// below it. A file or a pipe has the text already then.
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

// screen is where something is printed: how large it is, and what it takes beside text.
type screen struct {
	io.Writer
	width   int  // columns; 0: no limit
	rows    int  // 0: no limit
	takes   bool // commands, as to make it empty
	colours bool
	wide    bool // what is asked for is all there is
	exact   bool // what is printed on it is thrown away, for what programs read
}

// screenOf is the screen that a writer is; a file or a pipe has no width and no colours.
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

// emptied makes a terminal empty, and leaves what has scrolled away.
const emptied = "\x1b[H\x1b[2J"

// first are the lines of a text, which has the worst first, that fit the screen above another text, and how many there are more.
func (s *screen) first(text, below string) string {
	lines := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n")
	rows := s.rows
	for line := range strings.Lines(below) {
		rows -= s.taken(line)
	}
	takes, fits := 0, 0 // rows of the screen; lines that leave one to say how many there are more, and one to the cursor
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

// taken is how many rows of the screen a line takes: an address is not broken.
func (s *screen) taken(line string) int {
	return 1 + max(0, utf8.RuneCountInString(control.ReplaceAllString(line, ""))-1)/s.width
}

// control are the characters that a terminal takes for commands, and the colours, which are ours.
var control = regexp.MustCompile(`\x1b\[(?:[01]|3[123])m|[\x00-\x09\x0b-\x1f\x7f-\x{9f}]`)

// print prints to memory. What others wrote (messages, names in events) may hold commands for a terminal, which are not passed on.
func (s *screen) print(format string, args ...any) {
	_, _ = io.WriteString(s.Writer, control.ReplaceAllStringFunc(fmt.Sprintf(format, args...), func(found string) string {
		if len(found) > 2 {
			return found
		}
		return "?"
	}))
}

// Colours, as a terminal takes them (SGR).
const (
	red    = "31"
	yellow = "33"
	green  = "32"
	bold   = "1"
)

// paint colours a text, where there are colours.
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
