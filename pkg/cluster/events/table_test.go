package events_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
)

// words matches the places in the code where the reason of a problem is written.
var words = regexp.MustCompile(`(?:[Rr]eason:? ?[:!=]?=? |(?:say|report)\((?:blockdev\.\w+, )?|poolUnavailable = |ReasonNotConfigured = )"([A-Z]\w+)"`)

// TestTable: the table has each reason that the code has for a problem of a volume, a snapshot or a pool, and has each once.
func TestTable(t *testing.T) {
	found := map[string]string{}
	for _, directory := range []string{"blockdev", "filesystem", "device", "volume", "mount", "cluster"} {
		check.OK(t, filepath.WalkDir("../../"+directory, func(path string, e fs.DirEntry, err error) error {
			if e != nil && e.Name() == "remotepool" {
				return fs.SkipDir // what a node finds of other nodes' volumes is in the answers to health calls, and in no object
			}
			if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, match := range words.FindAllStringSubmatch(string(text), -1) {
				found[match[1]] = path
			}
			return err
		}))
	}
	if len(found) < 30 {
		t.Errorf("only %d reasons were found: %v", len(found), found)
	}
	seen := map[string]bool{}
	kinds := []string{"Volume", "ReplicatedVolume", "Snapshot", "Pool", "Node", "PersistentVolume", "PersistentVolumeClaim"}
	for _, entry := range events.Table {
		if seen[entry.Reason] {
			t.Errorf("%s is there twice", entry.Reason)
		}
		seen[entry.Reason] = true
		if len(entry.On) == 0 || slices.ContainsFunc(entry.On, func(kind string) bool { return !slices.Contains(kinds, kind) }) || !strings.HasSuffix(entry.Means, ".") {
			t.Errorf("%+v", entry)
		}
	}
	for reason, path := range found {
		if !seen[reason] {
			t.Errorf("the table has no %s (%s)", reason, path)
		}
	}
	t.Logf("%d reasons in the code, %d events", len(found), len(seen))
}
