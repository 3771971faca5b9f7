package memory_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func TestPool(t *testing.T) {
	disks := map[string]*memory.Disk{}
	pooltest.Run(t, func(_ testing.TB, dir string) blockdev.Pool {
		if disks[dir] == nil {
			disks[dir] = memory.NewDisk(512 << 20)
		}
		return disks[dir].Open("memory", nil)
	})
}

// TestHook: an operation that its hook refuses does nothing.
func TestHook(t *testing.T) {
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}
	spec := blockdev.Spec{Ref: ref, Name: "a", Size: 1 << 20}
	failure := errors.New("broken")
	var calls []string
	broken := map[string]bool{"Create": true}
	pool := memory.NewDisk(1<<30).Open("memory", func(operation string, ref blockdev.Ref) error {
		calls = append(calls, operation+" "+ref.String())
		if broken[operation] {
			return failure
		}
		return nil
	})
	if _, err := pool.Create(t.Context(), spec); !errors.Is(err, failure) {
		t.Fatalf("Create: %v, want %v", err, failure)
	}
	if _, err := pool.Get(t.Context(), ref); !errors.Is(err, errdefs.ErrNotFound) {
		t.Fatalf("Get after it: %v", err)
	}
	broken["Create"], broken["Delete"] = false, true
	if _, err := pool.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if err := pool.Delete(t.Context(), ref); !errors.Is(err, failure) {
		t.Fatalf("Delete: %v, want %v", err, failure)
	}
	if _, err := pool.Get(t.Context(), ref); err != nil {
		t.Fatalf("Get after it: %v", err)
	}
	want := "Create, Get, Create, Delete, Get"
	if have := strings.ReplaceAll(strings.Join(calls, ", "), " "+ref.String(), ""); have != want {
		t.Errorf("the hook was called for %s, want %s", have, want)
	}
}
