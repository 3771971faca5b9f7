// Package cli is the commands that show an operator what there is and what is wrong: those of "kubectl ashlar" and, over the pools of one
// machine, of "driver". They print overviews; where these come from the program says.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

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

// StatusProblems is the exit status of "status" where something is wrong; that of a command that failed is 1.
const StatusProblems = 2

// Exit prints the error of a command, in one line, and returns the exit status that it means.
func Exit(program string, err error) int {
	var problems *ProblemsError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &problems):
		return StatusProblems
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", program, err)
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

// every is how long --watch waits between two looks; tests wait less.
var every = 5 * time.Second

// showing is a command that shows something, as its flags say.
type showing struct {
	format string
	watch  bool
}

// add gives a command the flags of all that show something.
func (s *showing) add(cmd *cobra.Command, watch bool) {
	cmd.Flags().StringVarP(&s.format, "output", "o", "", "how to print: wide, json or yaml (default: a table as wide as the terminal)")
	if watch {
		cmd.Flags().BoolVarP(&s.watch, "watch", "w", false, fmt.Sprintf("look again every %s, until it is interrupted", every))
	}
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp)) // the flag is there
}

// run shows something, once or again and again; show returns what -o json prints, or prints on the screen.
func (s *showing) run(cmd *cobra.Command, show func(ctx context.Context, to *screen) (any, error)) error {
	if s.format != "" && !slices.Contains(formats, s.format) {
		return fmt.Errorf("--output=%s: give one of %s", s.format, strings.Join(formats, ", "))
	}
	if !s.watch {
		return s.once(cmd, show)
	}
	ctx := cmd.Context()
	for {
		to := screenOf(cmd.OutOrStdout())
		to.clear()
		err := s.once(cmd, show)
		var problems *ProblemsError
		if ctx.Err() != nil {
			return nil
		}
		if err != nil && !errors.As(err, &problems) {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
	}
}

func (s *showing) once(cmd *cobra.Command, show func(ctx context.Context, to *screen) (any, error)) error {
	to := screenOf(cmd.OutOrStdout())
	to.wide = s.format == "wide"
	if s.format == "json" || s.format == "yaml" {
		to.Writer = io.Discard
	}
	value, err := show(cmd.Context(), to)
	var problems *ProblemsError
	if err != nil && !errors.As(err, &problems) {
		return err
	}
	if to.failure != nil {
		return to.failure
	}
	if printed := encode(cmd.OutOrStdout(), s.format, value); printed != nil {
		return printed
	}
	return err
}

// screen is where something is printed: how wide it is, and whether it shows colours.
type screen struct {
	io.Writer
	width   int // columns; 0: no limit
	colours bool
	wide    bool // what is asked for is all there is
	failure error
}

// screenOf is the screen that a writer is; a file or a pipe has no width and no colours.
func screenOf(w io.Writer) *screen {
	s := &screen{Writer: w}
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return s
	}
	if width, _, err := term.GetSize(int(f.Fd())); err == nil {
		s.width = width
	}
	s.colours = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	return s
}

// clear makes a terminal empty, before it is drawn anew.
func (s *screen) clear() {
	if s.width > 0 {
		s.print("\x1b[H\x1b[2J\x1b[3J")
	}
}

// print prints, and keeps the first error for the end.
func (s *screen) print(format string, args ...any) {
	if _, err := fmt.Fprintf(s.Writer, format, args...); err != nil && s.failure == nil {
		s.failure = err
	}
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
