// Package lvm2 runs commands of lvm2 in its shell, and turns its complaints into errors.
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

// Shell is lvm2, asked through its own shell (lvm(8)), which keeps running: a command takes a fraction of the time of a process of its own. It uses the
// profile that lvm2 ships for lvmdbusd: each answer is one JSON document that ends in the status of the command (lvmreport(7)).
//
// One command runs at a time, as lvm2 itself locks the volume group. A caller that waits for the turn stops when its context ends. A command whose context
// ends is told to end, and killed if it does not.
type Shell struct {
	program string
	turn    chan struct{} // has one element while nobody has the turn
	session *command.Session
	sight   sight // which devices lvm2 may read
	asked   int   // commands of this session
	broken  bool  // a command was cut short: devices may have stayed suspended
	// ending, if set, ends a session that was given up. The turn is passed on only after that.
	ending func()
	// mend is called, with the turn, after a command was cut short.
	mend func(run Run)
	// flush makes durable what lvm2 wrote: it leaves that in the caches of the disks.
	flush   func() error
	flushed bool // nothing was changed since the last flush
}

// New returns a shell of a program: lvm, or what stands in for it in a test. The first command starts it. mend and flush are called with the turn.
func New(program string, mend func(run Run), flush func() error) *Shell {
	l := &Shell{program: program, turn: make(chan struct{}, 1), sight: sight{find: FindFilters, sysfs: "/sys/block"}, mend: mend, flush: flush, flushed: true}
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

// Hold calls do with the turn, for as many commands as it runs.
func (l *Shell) Hold(ctx context.Context, do func(run Run) error) error {
	select {
	case <-l.turn:
	case <-ctx.Done():
		return fmt.Errorf("wait for lvm: %w", ctx.Err())
	}
	defer l.pass()
	return do(func(args ...string) ([]Row, error) { return l.command(ctx, args) })
}

// sessionCommands is the number of commands after which a session ends: with each that has --config, the shell of lvm2 2.03.16 keeps about 2 kB of memory
// for good.
const sessionCommands = 1000

// pass passes the turn on. If a session was given up, it first waits for its end, and mends what it left; the caller, whose time may be over, does not
// wait for that.
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

// recover ends a session that was given up and mends what it left, at once: somebody may be waiting for a suspended device. The caller has the turn.
func (l *Shell) recover(ctx context.Context) {
	l.end() // until it has ended it may still change what is suspended
	l.broken = false
	l.mend(func(args ...string) ([]Row, error) { return l.command(ctx, args) })
}

// Dirty reports whether something was changed and not flushed. The caller has the turn.
func (l *Shell) Dirty() bool { return !l.flushed }

// FlushNext has the disks flushed after the next command, whatever that changes: for changes that were made before this shell. The caller has the turn, or
// is alone.
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

// settingsOf returns what is added to a command: it asks nothing, starts no daemon, and writes no copy of the metadata to /etc, which in a container
// nobody keeps. Nor does it discard what it frees, which may be zeroed for a volume that grows, or keep names of what is gone; and it lists tags as the driver reads them,
// whatever lvm.conf(5) says. A filter (sight.filter) is added, if there is one. The frequent commands have options for what matters to them: with --config, lvm2 reads its whole
// configuration before the command, and again after it.
func settingsOf(command, filter string) string {
	if command == "lvchange" || command == "lvcreate" {
		if filter != "" {
			filter = " --config 'devices{" + filter + "}'"
		}
		return " -y -An --ignoremonitoring" + filter
	}
	return ` -y --config 'activation{monitoring=0} backup{backup=0 archive=0} devices{issue_discards=0 ` + filter + `} metadata{record_lvs_history=0} report{list_item_separator=","}'`
}

// MaxWords is how many words a command may have (MAX_ARGS of lvm2's tools.h is 64), without
// those of settingsOf.
const MaxWords = 64 - 5

// argument matches what an argument may be: nothing in it that lvm2's shell would split or interpret.
var argument = regexp.MustCompile(`^[-A-Za-z0-9_+./=!:&#@,%|]+$`)

// Takes reports whether an argument is one that can be passed on.
func Takes(arg string) bool { return argument.MatchString(arg) }

// command runs one command and flushes the disks if it changed something: see Run. The caller has the turn.
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
	filter, err := l.sight.filter(ctx)
	if err != nil {
		return nil, fmt.Errorf("lvm %s: %w", line, err)
	}
	clean := l.flushed
	l.flushed = clean && !changing(args)
	l.asked++
	answer, err := l.ask(ctx, line+settingsOf(args[0], filter))
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
		l.abandon() // lvm2 may have given up half-way, and left devices suspended
	}
	if !clean { // what it found done may be the unflushed work of an earlier command
		if failed := l.flushChanges(line); failed != nil {
			return nil, failed
		}
	}
	return nil, err
}

// observe counts a command, its time, and its failure. That lvm2 refuses it is no failure: see Refused.
func observe(command string, began time.Time, err error) {
	command = metrics.Program(command)
	metrics.CommandSeconds.Observe(time.Since(began), command)
	if err != nil && !Refused(err) {
		metrics.CommandFailures.Inc(command)
	}
}

// checkWords returns errdefs.ErrInvalid for a command that lvm2's shell would not read as it is meant.
func checkWords(args []string) error {
	line := strings.Join(args, " ")
	// lvm2's shell does not answer a line of too many words.
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

// start starts a session, if there is none. If one was given up before, it mends first what that left.
func (l *Shell) start(ctx context.Context) error {
	if l.session == nil && l.broken {
		l.recover(ctx)
	}
	if l.session == nil { // recover may have started one
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

// flushChanges flushes what commands changed. ErrUnflushed if that fails: a power cut may undo it.
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
	return append(settings(), "LVM_COMMAND_PROFILE=lvmdbusd", "DM_DISABLE_UDEV=1", "LVM_SUPPRESS_FD_WARNINGS=1",
		"DBUS_SYSTEM_BUS_ADDRESS=unix:path=/dev/null") // no notice to lvmdbusd
}

// systemDir is the variable that says where lvm2's settings are, if not in /etc/lvm.
const systemDir = "LVM_SYSTEM_DIR"

// settings returns systemDir, as the driver has it.
func settings() []string {
	if dir := os.Getenv(systemDir); dir != "" {
		return []string{systemDir + "=" + dir}
	}
	return nil
}

// ask sends a line to the session and returns the answer. After an error the session is given up.
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

// lost gives up the session, in which a command got no answer, and returns the error for that.
func (l *Shell) lost(ctx context.Context, line string, err error) error {
	l.abandon()
	if ctx.Err() == nil {
		err = fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return fmt.Errorf("lvm %s: %w", line, err)
}

// abandon gives up the session, in which a command was cut short. The turn's end, or the next command, ends it and mends.
func (l *Shell) abandon() {
	l.broken = true
	l.ending, l.session = l.session.Close, nil
}

// trailingComma matches the comma that lvm2 2.03.16 leaves after the last line of some logs.
var trailingComma = regexp.MustCompile(`,(\s*\])`)

// reply is the answer to one command.
type reply struct {
	Report []map[string][]Row `json:"report"`
	Log    []Row              `json:"log"`
}

// read returns the rows of the report, the status of the command (success or failure, empty if it has none), and its complaints.
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
		case "warn":
			if strings.Contains(line["log_message"], unexpectedID) { // the error that follows speaks of free space
				failures = append(failures, line["log_message"])
			}
		}
	}
	return rows, status, failures
}

// ErrBroken is for a command that got no answer; it may have been carried out.
var ErrBroken = fmt.Errorf("%w: lvm2 gave no answer", errdefs.ErrUnavailable)

// ErrUnflushed is for a command that was carried out, and that a power cut may undo.
var ErrUnflushed = fmt.Errorf("%w: what lvm2 wrote is not known to be on the disks", errdefs.ErrUnavailable)

// ErrHalfDone is for a command that lvm2 could neither finish nor undo.
var ErrHalfDone = errors.New("lvm2 gave up half-way")

// ErrParts is for a thin pool that lvm2 does not bring up, as parts of it are up without it.
var ErrParts = fmt.Errorf("%w: parts of the thin pool are up without it", errdefs.ErrUnavailable)

// ErrSnapshotMade is for a message to make a snapshot that lvm2 does not send, as the thin pool has made it already.
var ErrSnapshotMade = fmt.Errorf("%w: lvm2 was cut short while it made a snapshot", errdefs.ErrUnavailable)

// ErrDisagree is for a thin pool that has not noted the last change that lvm2 wrote down, and is not going to be told of it: lvm2 refuses every change.
var ErrDisagree = fmt.Errorf("%w: lvm2 and the thin pool disagree about its last change; see docs/runbooks/thin-pool-failed.md", errdefs.ErrUnavailable)

// ErrHeld is for a volume that lvm2 could not have the thin pool remove: the kernel lets go of it a moment after its device is gone.
var ErrHeld = fmt.Errorf("%w: the thin pool still holds it", errdefs.ErrUnavailable)

// ErrNoLV is for a logical volume that is not there.
var ErrNoLV = errors.New("no such logical volume")

// unexpectedID is what lvm2 warns of where it refuses a thin pool with ErrDisagree.
const unexpectedID = "unexpected transaction id"

// complaints maps lvm2's messages (lib/ of its source) to errors. The first one that is found counts.
var complaints = []struct {
	text string
	err  error
}{
	{"already contain thin device", ErrSnapshotMade},
	{"is prohibited while", ErrParts},
	{unexpectedID, ErrDisagree},
	{"transaction_id is", ErrDisagree},
	{"device or resource busy; failed to process message", ErrHeld},
	{"manual intervention required", ErrHalfDone},
	{"insufficient free space", errdefs.ErrNoSpace},
	{"insufficient suitable", errdefs.ErrNoSpace},
	{"reached threshold", errdefs.ErrNoSpace},
	{"not enough free space", errdefs.ErrNoSpace},
	{"exceeds maximum metadata size", errdefs.ErrNoSpace}, // of the metadata area, also the next
	{"too large for circular buffer", errdefs.ErrNoSpace},
	{"already exists in volume group", errdefs.ErrExists},
	{"failed to find logical volume", ErrNoLV},
	{"not found in volume group", ErrNoLV},
	{"while pvs are missing", errdefs.ErrUnavailable},
	{"pvs missing", errdefs.ErrUnavailable},
	{"refusing activation of partial", errdefs.ErrUnavailable},
	{"multiple vgs found with the same name", errdefs.ErrUnavailable},
	{"volume group", errdefs.ErrUnavailable}, // "... not found", "Cannot process ..."; after all that name one
	{"failed to write", errdefs.ErrUnavailable},
	{"cannot send messages", errdefs.ErrUnavailable}, // of a thin pool that has to be repaired
	{"error writing device", errdefs.ErrUnavailable},
	{"error reading device", errdefs.ErrUnavailable},
	{"is in use", errdefs.ErrInUse},
	{"filesystem in use", errdefs.ErrInUse},
	{"used by another device", errdefs.ErrInUse},
}

// Refused reports whether an error means that lvm2 has changed nothing. After any other failure nobody knows.
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
