package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"sigs.k8s.io/yaml"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
)

// hostile is a text that a node, a tenant or the label of a filesystem may have: it clears the screen, says that all is well, sets the title of the window,
// goes up a line, reverses what follows (U+202E), and begins an escape sequence in one character (U+009B).
const hostile = "x\x1b[2J\x1b[HNothing is wrong.\x1b]0;title\a\r\n\nNo\u202eon\u009b31mand\xff\x9b"

func TestLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                     "",
		"größe 3 × 日本 – fine…": "größe 3 × 日本 – fine…",
		"two\nlines\tand more": "two lines and more",
		hostile:                `x\x1b[2J\x1b[HNothing is wrong.\x1b]0;title\a   No\u202eon\u009b31mand\xff\x9b`,
		"\ufffd":               "\ufffd",
	} {
		if got := Line(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestPlain(t *testing.T) {
	var out bytes.Buffer
	w := Plain(&out)
	for _, part := range []string{"ok   größ", "e\n\x1b[2Jfail", "ure\r\nend \xe2", "\x80\xa6"} {
		_, err := w.Write([]byte(part))
		check.OK(t, err)
	}
	check.OK(t, w.Close())
	if want := "ok   größe\n\\x1b[2Jfailure \nend …"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

// telling is a source in which all texts of others are hostile.
type telling struct{ fixed }

func (s telling) Details(_ context.Context, v *overview.Volume) ([]Event, []string, error) {
	v.Devices, v.Mounts = []string{hostile}, []string{hostile}
	return []Event{{Time: now, Type: hostile, Reason: hostile, Message: hostile, Of: hostile}}, []string{hostile}, nil
}

// TestHostileTexts: a terminal shows texts of others as nothing but text, for all commands and formats.
func TestHostileTexts(t *testing.T) {
	bad := func() *overview.Overview {
		problem := []overview.Problem{overview.Found(hostile, hostile, hostile, overview.KindVolume, hostile)}
		progress := &overview.Progress{Done: 1, Total: 2}
		o := &overview.Overview{Taken: now, Cluster: true, Driver: hostile, Version: hostile, Missing: []string{hostile}, Classes: []overview.Class{{Name: hostile, Pool: hostile}},
			Nodes: []overview.Node{{Name: hostile, Problems: problem, Pools: []overview.Pool{{Node: hostile, Name: hostile, Kind: hostile, UUID: hostile, Problems: problem,
				Strays: []overview.Stray{{ID: hostile, Name: hostile, PersistentVolume: hostile, Claim: &overview.Ref{Namespace: hostile, Name: hostile}}}}}}},
			Volumes: []overview.Volume{{ID: hostile, Name: "v", Node: hostile, Pool: hostile, Filesystem: hostile, Claim: &overview.Ref{Namespace: hostile, Name: hostile},
				PersistentVolume: hostile, Pods: []overview.Ref{{Namespace: hostile, Name: hostile}}, Source: hostile, State: hostile, Failure: hostile, Moving: hostile, Progress: progress, Problems: problem,
				Settings: map[string]string{hostile: hostile, hostile + "2": hostile}, Published: hostile, Devices: []string{hostile}, Mounts: []string{hostile}}},
			Snapshots: []overview.Snapshot{{ID: hostile, Name: hostile, Source: hostile, Group: hostile, State: hostile, Failure: hostile, Problems: problem}}}
		o.Finish()
		return o
	}
	for _, command := range []string{"status", "pools", "volumes", "describe v", "capacity", "__complete describe ", "__complete volumes --node "} {
		for _, format := range []string{"", " -o=wide", " -o=json", " -o=yaml"} {
			if strings.HasPrefix(command, "__") && format != "" {
				continue
			}
			out, beside, err := runBoth(telling{fixed{bad()}}, strings.Split(command+format, " ")...)
			if err != nil && !strings.HasPrefix(err.Error(), "problems:") && command != "capacity" {
				t.Errorf("%s%s: %v", command, format, err)
			}
			for _, r := range out + beside {
				if r != '\n' && !unicode.IsPrint(r) {
					t.Errorf("%s%s prints %q:\n%s%s", command, format, r, out, beside)
					break
				}
			}
		}
	}
}

// TestExactTexts: output for programs has every text unchanged, so describe finds a name from there.
func TestExactTexts(t *testing.T) {
	const name = "a\nb\tc: \x1b[2J\u009b31m\u202e\u200b\x7f\u2028\U000e0001\ufeff<größe> \"日本\" \\u202e"
	made := func() *overview.Overview {
		o := &overview.Overview{Taken: now, Missing: []string{}, Nodes: []overview.Node{{Name: "n", Pools: []overview.Pool{{Node: "n", Name: "p", UUID: name}}}},
			Volumes: []overview.Volume{{ID: "vol.p.1", Name: name, Node: "n", Pool: "p", Settings: map[string]string{name: name, "x": "y"}, State: overview.Ready}}}
		o.Finish()
		return o
	}
	for _, format := range []string{"json", "yaml"} {
		read := func(into any, args ...string) {
			t.Helper()
			out, err := run(fixed{made()}, append(args, "-o", format)...)
			check.OK(t, err)
			for _, r := range out {
				if r != '\n' && !unicode.IsPrint(r) {
					t.Errorf("%s -o %s prints %q:\n%s", args[0], format, r, out)
				}
			}
			if format == "json" {
				check.OK(t, json.Unmarshal([]byte(out), into))
			} else {
				check.OK(t, yaml.Unmarshal([]byte(out), into))
			}
		}
		var volumes []overview.Volume
		read(&volumes, "volumes")
		var pools []overview.Pool
		read(&pools, "pools")
		var d description
		read(&d, "describe", name)
		var o overview.Overview
		read(&o, "status")
		for what, got := range map[string]string{"volumes": volumes[0].Name, "its settings": volumes[0].Settings[name], "pools": pools[0].UUID, "describe": d.Volume.Name, "status": o.Volumes[0].Name} {
			if got != name {
				t.Errorf("%s, -o %s: %q, want %q", what, format, got, name)
			}
		}
	}
}
