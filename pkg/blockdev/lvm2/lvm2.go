// Package lvm2 asks lvm2, and says what its answers mean.
package lvm2

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/internal/undoing"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// Shell is lvm2, asked through its own shell (lvm(8)), which stays: a command takes a
// fraction of what a process of its own takes. lvm2 ships the profile that lvmdbusd
// drives it by; with it every answer is one JSON document that ends in the status of the
// command (lvmreport(7)).
//
// One command runs at a time, as lvm2 itself holds a lock on the volume group. Whoever
// waits for his turn stops waiting when his context ends; a command whose context ends
// is told to end, and killed if it does not.
type Shell struct {
	program string
	turn    chan struct{} // holds one token while nobody has the turn
	session *command.Session
	asked   int  // commands of this session
	broken  bool // a command was cut short: devices may have stayed suspended
	// ending, if set, waits for a session that was given up; the turn comes after it.
	ending func()
	// mend is called, with the turn, after a command was cut short.
	mend func(run Run)
	// flush makes what lvm2 wrote last: it leaves that in the caches of the disks.
	flush   func() error
	flushed bool // nothing was changed since
}

// New returns a shell of a program: lvm, or what stands in for it in a test. It starts with the first command. mend and flush
// are called by who has the turn.
func New(program string, mend func(run Run), flush func() error) *Shell {
	l := &Shell{program: program, turn: make(chan struct{}, 1), mend: mend, flush: flush, flushed: true}
	l.turn <- struct{}{}
	return l
}

// Row is one line of a report, by column.
type Row map[string]string

// Run runs one command and returns the rows of its report, if it makes one.
func (l *Shell) Run(ctx context.Context, args ...string) (rows []Row, err error) {
	err = l.Hold(ctx, func(run Run) error {
		rows, err = run(args...)
		return err
	})
	return rows, err
}

// Run runs one command and returns the rows of its report.
type Run func(args ...string) ([]Row, error)

// Hold gives do the turn for as many commands as it runs.
func (l *Shell) Hold(ctx context.Context, do func(run Run) error) error {
	select {
	case <-l.turn:
	case <-ctx.Done():
		return fmt.Errorf("wait for lvm: %w", ctx.Err())
	}
	defer l.pass()
	return do(func(args ...string) ([]Row, error) { return l.command(ctx, args) })
}

// sessionCommands is after how many commands a session ends: with each that has --config, the
// shell of lvm2 2.03.16 keeps about 2 kB of memory for good.
const sessionCommands = 1000

// pass passes the turn on; but not before a session that was given up is gone, and what it
// left is mended, which the caller, whose time may be over, does not wait for.
func (l *Shell) pass() {
	if l.ending == nil {
		if l.asked >= sessionCommands {
			l.end()
		}
		l.turn <- struct{}{}
		return
	}
	go func() {
		ctx, cancel := undoing.Context(context.Background())
		defer cancel()
		l.recover(ctx)
		if l.ending != nil {
			l.end()
		}
		l.turn <- struct{}{}
	}()
}

// recover mends what a session that was given up has left; at once, as somebody may be
// waiting for a suspended device. The caller has the turn.
func (l *Shell) recover(ctx context.Context) {
	l.end() // it has a last word in what is suspended
	l.broken = false
	l.mend(func(args ...string) ([]Row, error) { return l.command(ctx, args) })
}

// Dirty reports whether something was changed that was not flushed. The caller has the turn.
func (l *Shell) Dirty() bool { return !l.flushed }

// FlushNext has the disks flushed after the next command, whatever that changes: something was changed before the first one.
// The caller has the turn, or is the only one yet.
func (l *Shell) FlushNext() { l.flushed = false }

// Close ends the session, once nobody has the turn.
func (l *Shell) Close() {
	<-l.turn
	defer func() { l.turn <- struct{}{} }()
	l.end()
}

func (l *Shell) end() {
	if l.session != nil {
		l.session.Close()
		l.session = nil
	}
	if l.ending != nil {
		l.ending()
		l.ending = nil
	}
}

// settingsOf returns what is added to a command: it asks nothing, starts no daemon, and
// writes no copy of the metadata to /etc, which in a container is nobody's. The commands of
// which there are many say so by options: with --config, lvm2 reads its whole configuration
// before the command, and once more after it.
func settingsOf(command string) string {
	if command == "lvchange" || command == "lvcreate" {
		return " -y -An --ignoremonitoring"
	}
	return " -y --config 'activation{monitoring=0} backup{backup=0 archive=0}'"
}

// MaxWords is how many words a command may have (MAX_ARGS of lvm2's tools.h is 64), without
// those of settingsOf.
const MaxWords = 64 - 5

// argument is what an argument may be: the shell has nothing to take apart in it.
var argument = regexp.MustCompile(`^[-A-Za-z0-9_+./=!:&#@,%|]+$`)

// Takes reports whether an argument is one that can be passed on.
func Takes(arg string) bool { return argument.MatchString(arg) }

func (l *Shell) command(ctx context.Context, args []string) (_ []Row, err error) {
	ctx, end := trace.Start(ctx, "lvm "+args[0])
	defer func(began time.Time) { observe(args[0], began, err); end(err) }(time.Now())
	line := strings.Join(args, " ")
	if err := checkWords(args); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("lvm %s: %w", line, err)
	}
	if err := l.start(ctx); err != nil {
		return nil, fmt.Errorf("lvm %s: %w", line, err)
	}
	clean := l.flushed
	l.flushed = clean && !changing(args)
	l.asked++
	answer, err := l.ask(ctx, line+settingsOf(args[0]))
	if err != nil {
		return nil, err
	}
	rows, status, failures := answer.read()
	switch status {
	case "success":
		return rows, l.flushChanges(line)
	case "":
		return nil, l.lost(ctx, line, errors.New("an answer without the status of the command"))
	}
	if noise := l.session.Noise(); noise != "" {
		failures = append(failures, noise)
	}
	log, err := l.ask(ctx, "lastlog -S all")
	if err != nil {
		return nil, fmt.Errorf("lvm %s failed, and did not say why: %w", line, err)
	}
	_, _, more := log.read()
	if err = complaint(line, append(more, failures...)); !Refused(err) {
		l.abandon() // it gave up half-way, and left what it had suspended
	}
	if !clean { // that there is nothing to do may be the work of one before it
		if failed := l.flushChanges(line); failed != nil {
			return nil, failed
		}
	}
	return nil, err
}

// observe counts that a command was asked for. That there is no room, or what is asked for is there or gone, is an answer.
func observe(command string, began time.Time, err error) {
	command = metrics.Program(command)
	metrics.CommandSeconds.Observe(time.Since(began), command)
	if err != nil && !Refused(err) {
		metrics.CommandFailures.Inc(command)
	}
}

// checkWords returns errdefs.ErrInvalid for a command that lvm2's shell would not take as it is meant.
func checkWords(args []string) error {
	line := strings.Join(args, " ")
	// lvm2's shell says nothing in answer to a line of too many words.
	if len(args) > MaxWords {
		return fmt.Errorf("%w: a command of %d words, %d are the most: lvm %.200s", errdefs.ErrInvalid, len(args), MaxWords, line)
	}
	for _, arg := range args {
		if !Takes(arg) {
			return fmt.Errorf("%w: %q in lvm %s", errdefs.ErrInvalid, arg, line)
		}
	}
	return nil
}

// start starts a session, if there is none; before it, what one that was given up has left is mended.
func (l *Shell) start(ctx context.Context) error {
	if l.session == nil && l.broken {
		l.recover(ctx)
	}
	if l.session == nil { // recovering may have started one
		l.end()
		if err := ctx.Err(); err != nil {
			return err
		}
		var err error
		// Without udev_sync (see DM_DISABLE_UDEV in libdm): in a container there is no udev
		// to wait for, and device nodes come from the kernel and from libdm.
		if l.session, err = command.Start(append(environment(), fmt.Sprint("LVM_REPORT_FD=", command.AnswerFD)), l.program); err != nil {
			return fmt.Errorf("%w: start lvm: %w; install lvm2", errdefs.ErrUnavailable, err)
		}
		l.asked = 0
	}
	return nil
}

// changing reports whether a command changes the metadata of the group.
func changing(args []string) bool {
	switch args[0] {
	case "fullreport", "lvs":
		return false
	case "lvchange":
		return !slices.Contains(args, "-ay") && !slices.Contains(args, "--refresh")
	}
	return true
}

// flushChanges flushes what commands changed. Where that fails, a power cut may undo them.
func (l *Shell) flushChanges(line string) error {
	if l.flushed {
		return nil
	}
	if err := l.flush(); err != nil {
		return fmt.Errorf("lvm %s: %w", line, errdefs.Recast(ErrUnflushed, err, "flush the disks"))
	}
	l.flushed = true
	return nil
}

func environment() []string {
	env := []string{"LVM_COMMAND_PROFILE=lvmdbusd", "DM_DISABLE_UDEV=1", "LVM_SUPPRESS_FD_WARNINGS=1",
		"DBUS_SYSTEM_BUS_ADDRESS=unix:path=/dev/null"} // lvmdbusd is not told of changes
	if dir := os.Getenv("LVM_SYSTEM_DIR"); dir != "" {
		env = append(env, "LVM_SYSTEM_DIR="+dir)
	}
	return env
}

func (l *Shell) ask(ctx context.Context, line string) (reply, error) {
	var answer reply
	_, err := l.session.Ask(ctx, line, func(text []byte) bool {
		answer = reply{}
		return bytes.HasSuffix(text, []byte("}\n")) && json.Unmarshal(trailingComma.ReplaceAll(text, []byte("$1")), &answer) == nil
	})
	if err != nil {
		err = l.lost(ctx, line, err)
	}
	return answer, err
}

// lost ends the session, in which a command got no answer.
func (l *Shell) lost(ctx context.Context, line string, err error) error {
	l.abandon()
	if ctx.Err() == nil {
		err = fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return fmt.Errorf("lvm %s: %w", line, err)
}

// abandon gives up the session: a command was cut short.
func (l *Shell) abandon() {
	l.broken = true
	l.ending, l.session = l.session.Close, nil
}

// trailingComma is left by lvm2 2.03.16 after the last line of some logs.
var trailingComma = regexp.MustCompile(`,(\s*\])`)

// reply is the answer to one command.
type reply struct {
	Report []map[string][]Row `json:"report"`
	Log    []Row              `json:"log"`
}

// read returns the rows of the report, how the command ended (success or failure, or nothing
// if it does not say), and what it complained of.
func (a reply) read() (rows []Row, status string, failures []string) {
	for _, report := range a.Report {
		for _, some := range report {
			rows = append(rows, some...)
		}
	}
	for _, line := range a.Log {
		switch line["log_type"] {
		case "status":
			status = line["log_message"]
		case "error":
			failures = append(failures, line["log_message"])
		}
	}
	return rows, status, failures
}

// ErrBroken: a command got no answer; it may have been carried out.
var ErrBroken = fmt.Errorf("%w: lvm2 gave no answer", errdefs.ErrUnavailable)

// ErrUnflushed: a command was carried out, but a power cut may undo it.
var ErrUnflushed = fmt.Errorf("%w: what lvm2 wrote is not known to be on the disks", errdefs.ErrUnavailable)

// ErrHalfDone: lvm2 could neither finish nor undo what it did to devices.
var ErrHalfDone = errors.New("lvm2 gave up half-way")

// ErrParts: lvm2 does not bring a thin pool up while parts of it are up without it.
var ErrParts = fmt.Errorf("%w: parts of the thin pool are up without it", errdefs.ErrUnavailable)

// ErrSnapshotMade: lvm2 does not send a thin pool the message to make a snapshot that it has made already.
var ErrSnapshotMade = fmt.Errorf("%w: lvm2 was cut short while it made a snapshot", errdefs.ErrUnavailable)

// ErrHeld: lvm2 could not tell a thin pool to remove a volume, as the kernel lets go of it a
// moment after its device is gone.
var ErrHeld = fmt.Errorf("%w: the thin pool still holds it", errdefs.ErrUnavailable)

// ErrNoLV: the logical volume is not there.
var ErrNoLV = errors.New("no such logical volume")

// complaints are what lvm2 says (lib/ of its source), and what it means. The first that
// is found counts.
var complaints = []struct {
	text string
	err  error
}{
	{"already contain thin device", ErrSnapshotMade},
	{"is prohibited while", ErrParts},
	{"device or resource busy; failed to process message", ErrHeld},
	{"manual intervention required", ErrHalfDone},
	{"insufficient free space", errdefs.ErrNoSpace},
	{"insufficient suitable", errdefs.ErrNoSpace},
	{"reached threshold", errdefs.ErrNoSpace},
	{"not enough free space", errdefs.ErrNoSpace},
	{"metadata too large", errdefs.ErrNoSpace},
	{"already exists in volume group", errdefs.ErrExists},
	{"failed to find logical volume", ErrNoLV},
	{"not found in volume group", ErrNoLV},
	{"while pvs are missing", errdefs.ErrUnavailable},
	{"pvs missing", errdefs.ErrUnavailable},
	{"refusing activation of partial", errdefs.ErrUnavailable},
	{"volume group", errdefs.ErrUnavailable}, // "... not found", "Cannot process ..."; after all that name one
	{"failed to write", errdefs.ErrUnavailable},
	{"cannot send messages", errdefs.ErrUnavailable}, // of a thin pool that has to be repaired
	{"error writing device", errdefs.ErrUnavailable},
	{"error reading device", errdefs.ErrUnavailable},
	{"is in use", errdefs.ErrInUse},
	{"filesystem in use", errdefs.ErrInUse},
	{"used by another device", errdefs.ErrInUse},
}

// Refused reports whether an error is lvm2's own word that it changed nothing. After any
// other failure that is not known.
func Refused(err error) bool {
	for _, refusal := range []error{errdefs.ErrNoSpace, errdefs.ErrExists, ErrNoLV, errdefs.ErrInUse, errdefs.ErrInvalid} {
		if errors.Is(err, refusal) {
			return true
		}
	}
	return false
}

func complaint(line string, failures []string) error {
	text := strings.Join(failures, "; ")
	if text == "" {
		text = "it failed and did not say why"
	}
	lower := strings.ToLower(text)
	for _, known := range complaints {
		if strings.Contains(lower, known.text) {
			return fmt.Errorf("%w: lvm %s: %s", known.err, line, text)
		}
	}
	return fmt.Errorf("lvm %s: %s", line, text)
}
