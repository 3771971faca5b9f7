package lvm2

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestSettings: with the settings that are added to it, the longest command has no more words than lvm2 takes.
func TestSettings(t *testing.T) {
	for _, command := range []string{"lvcreate", "lvchange", "lvremove"} {
		settings, _, _ := strings.Cut(settingsOf(command, "filter=[]"), "'") // a text in quotes is one word
		if words := MaxWords + len(strings.Fields(settings)) + 1; words > 64 {
			t.Errorf("with the settings of %s it is %d words", command, words)
		}
	}
}

// TestErrors: messages of lvm2 2.03, and the errors for them.
func TestErrors(t *testing.T) {
	for text, want := range map[string]error{
		`Volume group "vg" has insufficient free space (1 extents): 2 required.`:                                                                                    errdefs.ErrNoSpace,
		`Insufficient suitable allocatable extents for logical volume vol.x: 3 more required`:                                                                       errdefs.ErrNoSpace,
		`Free space in pool vg/tp reached threshold; `:                                                                                                              errdefs.ErrNoSpace,
		`VG vg 4096 metadata on /dev/sda (522 bytes) exceeds maximum metadata size; VG metadata too large for circular buffer`:                                      errdefs.ErrNoSpace,
		`Logical Volume "vol.x" already exists in volume group "vg"`:                                                                                                errdefs.ErrExists,
		`Failed to find logical volume "vg/vol.x"`:                                                                                                                  ErrNoLV,
		`Cannot change VG vg while PVs are missing.; Cannot process volume group vg`:                                                                                errdefs.ErrUnavailable,
		`Refusing activation of partial LV vg/vol.x.  Use '--activationmode partial' to override.`:                                                                  errdefs.ErrUnavailable,
		`Volume group "vg" not found; Cannot process volume group vg`:                                                                                               errdefs.ErrUnavailable,
		`Error writing device /dev/sda at 4096 length 512.; Failed to write VG vg.`:                                                                                 errdefs.ErrUnavailable,
		`Activation of logical volume vg/tp is prohibited while logical volume vg/tp_tmeta is active.`:                                                              ErrParts,
		`Thin pool vg-tp already contain thin device with device_id 3.; Manual intervention may be required`:                                                        ErrSnapshotMade,
		`message ioctl on  (254:6) failed: Device or resource busy; Failed to process message "delete 1".; Failed to update pool`:                                   ErrHeld,
		`WARNING: Thin pool vg/tp has unexpected transaction id 77, expecting 78.; Cannot create new thin volume, free space in thin pool vg/tp reached threshold.`: ErrDisagree,
		`Thin pool vg-tp-tpool (253:2) transaction_id is 77, while expected 78.; Failed to suspend vg/tp with queued messages.`:                                     ErrDisagree,
		`Logical volume vg/vol.x is in use.`:                                                                                                                        errdefs.ErrInUse,
		`Logical volume vg/vol.x contains a filesystem in use.`:                                                                                                     errdefs.ErrInUse,
		`Logical volume vg/vol.x is used by another device.`:                                                                                                        errdefs.ErrInUse,
	} {
		err := complaint("lvcreate vg", strings.Split(text, "; "))
		if !errors.Is(err, want) || !strings.Contains(err.Error(), "lvcreate vg") || !strings.Contains(err.Error(), strings.TrimSuffix(text, "; ")) {
			t.Errorf("%q: %v, want %v", text, err, want)
		}
		for _, other := range []error{errdefs.ErrNoSpace, errdefs.ErrExists, ErrNoLV, errdefs.ErrUnavailable, errdefs.ErrInUse, errdefs.ErrDataLoss, errdefs.ErrNotFound} {
			if !errors.Is(want, other) && errors.Is(err, other) {
				t.Errorf("%q: also %v", text, other)
			}
		}
	}
	for _, failures := range [][]string{nil, {"Something new."}} {
		err := complaint("vgs", failures)
		for _, other := range []error{errdefs.ErrNoSpace, errdefs.ErrExists, ErrNoLV, errdefs.ErrUnavailable, errdefs.ErrInUse} {
			if errors.Is(err, other) {
				t.Errorf("%q: %v", failures, err)
			}
		}
	}
}

// TestAnswers: when lvm2 refuses a command, its session goes on. A command that failed half-way, or got no answer, ends the session, and mend is called.
func TestAnswers(t *testing.T) {
	status := func(status string) string {
		return `{ "log": [ {"log_type":"status", "log_message":"` + status + `"} ] }`
	}
	complaint := func(text string) string {
		return `{ "log": [ {"log_type":"error", "log_message":"` + text + `"} ] }`
	}
	for name, c := range map[string]struct {
		answers []string // one to each line; after the last one it ends
		want    error    // nil: none of the sentinels
		says    string
		goesOn  bool
	}{
		"not flushed":     {[]string{status("success")}, ErrUnflushed, "no space left", true},
		"refused":         {[]string{status("failure"), complaint("insufficient free space")}, errdefs.ErrNoSpace, "insufficient free space", true},
		"failed":          {[]string{status("failure"), complaint("Aborting. Manual intervention required.")}, nil, "Manual intervention", false},
		"not undone":      {[]string{status("failure"), complaint("Device vg-lv-real (254:3) is used by another device.; Aborting. Manual intervention required.")}, ErrHalfDone, "used by another", false},
		"did not say":     {[]string{"{}"}, ErrBroken, "without the status", false},
		"died":            {nil, ErrBroken, "without an answer", false},
		"died afterwards": {[]string{status("failure")}, ErrBroken, "did not say why", false},
	} {
		t.Run(name, func(t *testing.T) {
			mended := false
			l := New("lvm", func(Run) { mended = true }, func() error { return unix.ENOSPC })
			l.sight.find = finds(Filters{})
			script := ""
			for _, answer := range c.answers {
				script += "read -r line; echo '" + answer + "' >&3; "
			}
			var err error
			if l.session, err = command.Start(nil, "sh", "-c", script+"read -r line; exit 0"); err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			_, err = l.Run(t.Context(), "lvremove", "vg/lv")
			if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), "lvremove vg/lv") || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if Refused(err) != errors.Is(c.want, errdefs.ErrNoSpace) {
				t.Errorf("refused: %v", err)
			}
			<-l.turn // the turn comes after mend
			if mended == c.goesOn || (l.session != nil) != c.goesOn {
				t.Errorf("session %v, mended %v", l.session, mended)
			}
			l.turn <- struct{}{}
		})
	}
}

// TestSessionEnds: a session ends after sessionCommands, between two holders of the turn. It does not count as cut short.
func TestSessionEnds(t *testing.T) {
	l := New("lvm", func(Run) { t.Error("recovered") }, nil)
	l.sight.find = finds(Filters{})
	var err error
	if l.session, err = command.Start(nil, "sh", "-c", `while read -r line; do echo '{ "log": [ {"log_type":"status", "log_message":"success"} ] }' >&3; done`); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.Hold(t.Context(), func(run Run) error {
		for n := range sessionCommands + 1 {
			if _, err := run("lvs"); err != nil || l.session == nil {
				return fmt.Errorf("command %d: session %v, %w", n, l.session, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if l.session != nil || l.broken {
		t.Errorf("after it: session %v, broken %v", l.session, l.broken)
	}
}

// TestRefusesWords: arguments that lvm2's shell would split, and lines that it does not answer, are refused. No program is started for them.
func TestRefusesWords(t *testing.T) {
	l := New("lvm", func(Run) { t.Error("recovered") }, nil)
	for _, args := range [][]string{{"lvs", "a b"}, {"lvs", "a;b"}, {"lvs", "a\nb"}, {"lvs", `"a"`}, {"lvs", "'a'"}, {"lvs", ""}, {"lvs", "a\\b"}, {"lvs", "$a"}, {"lvs", "ä"},
		slices.Repeat([]string{"a"}, MaxWords+1)} {
		if _, err := l.Run(t.Context(), args...); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%q: %v", args, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Run(ctx, "lvs"); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if l.session != nil {
		t.Error("a session was started")
	}
	l.Close()
}
