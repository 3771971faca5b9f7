package node

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// began starts a check whose caller is gone. It ends with the error that is sent to end, or when it is stopped; told has what the caller gets.
func began(s *Server, key string) (end chan<- error, told <-chan error) {
	caller, gone := context.WithCancel(context.Background())
	running, ending, answer := make(chan struct{}), make(chan error), make(chan error, 1)
	go func() {
		answer <- s.checks.run(caller, key, func(ctx context.Context) error {
			close(running)
			select {
			case err := <-ending:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	<-running
	gone()
	return ending, answer
}

// TestCheckGoesOn: a check does not end with its caller. If it succeeds, the retry checks again; if it fails, the first retry gets its error, and does not
// check.
func TestCheckGoesOn(t *testing.T) {
	s := New(t.Context(), nil, nil, Options{})
	key, checked := volume.KeyOf("v"), 0
	retry := func() error {
		return s.checks.run(t.Context(), key, func(context.Context) error { checked++; return nil })
	}
	for _, said := range []error{nil, errdefs.ErrDataLoss} {
		end, told := began(s, key)
		end <- said
		if err := <-told; !errors.Is(err, context.Canceled) {
			t.Fatalf("a caller who is gone is told %v", err)
		}
		if err := retry(); !errors.Is(err, said) {
			t.Fatalf("the retry is told %v, not %v", err, said)
		}
		if err := retry(); err != nil {
			t.Fatal(err)
		}
	}
	if checked != 3 { // of four retries one got an error instead
		t.Errorf("checked %d times", checked)
	}
	// A caller who waits gets the error, and nothing is kept for the next.
	if err := s.checks.run(t.Context(), key, func(context.Context) error { return errdefs.ErrDataLoss }); !errors.Is(err, errdefs.ErrDataLoss) {
		t.Fatal(err)
	}
	if err := retry(); err != nil {
		t.Fatal(err)
	}
}

// TestCheckEnds: a check whose caller is gone is stopped when somebody unstages or unpublishes the volume, or the driver ends. A retry does not stop it, and
// while the caller waits nobody does. Of a check that was stopped no error is kept.
func TestCheckEnds(t *testing.T) {
	id := volume.ID{Kind: blockdev.Volume, Pool: "p", Key: volume.KeyOf("v")}
	driver, stop := context.WithCancel(t.Context())
	defer stop()
	s := New(driver, nil, nil, Options{})
	for name, request := range map[string]any{
		"unstage":   &csi.NodeUnstageVolumeRequest{VolumeId: id.String()},
		"ephemeral": &csi.NodeUnpublishVolumeRequest{VolumeId: "v"},
	} {
		_, told := began(s, id.Key)
		s.Interrupt(&csi.NodeStageVolumeRequest{VolumeId: id.String()}) // a retry wants it to go on
		select {
		case err := <-told:
			t.Fatalf("%s: ended by a retry: %v", name, err)
		case <-time.After(50 * time.Millisecond): // long enough for the answer of another goroutine
		}
		s.Interrupt(request)
		if err := <-told; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if err := s.checks.forget(id.Key); err != nil {
			t.Errorf("%s: kept: %v", name, err)
		}
	}
	_, told := began(s, id.Key)
	stop()
	<-told

	// As long as its caller waits, nobody else ends it.
	s = New(t.Context(), nil, nil, Options{})
	if err := s.checks.run(t.Context(), id.Key, func(ctx context.Context) error {
		s.Interrupt(&csi.NodeUnstageVolumeRequest{VolumeId: id.String()})
		return ctx.Err()
	}); err != nil {
		t.Error(err)
	}
}

// TestFlags: records of mount flags are equal for the same flags in any order, and differ for others; a publication may have no SELinux context, or the staged
// one, or any if nothing is recorded.
func TestFlags(t *testing.T) {
	context := `context="system_u:object_r:container_file_t:s0:c1,c2"`
	if flagsOf([]string{"a,b", "c"}) != flagsOf([]string{"c", "b", "a", "a"}) || flagsOf(nil) == flagsOf([]string{"a"}) || flagsOf(nil) == flagsOf([]string{context}) {
		t.Error("flags are the same, or differ, where they should not")
	}
	for _, c := range []struct {
		staged, published []string
		same              bool
	}{{nil, nil, true}, {[]string{context}, nil, true}, {nil, []string{context}, false}, {[]string{"a," + context}, []string{context, "b"}, true},
		{[]string{context}, []string{`context="x"`}, false}} {
		if sameContext(flagsOf(c.staged), c.published) != c.same {
			t.Errorf("staged with %v, published with %v: same context %v", c.staged, c.published, !c.same)
		}
	}
	if !sameContext("", []string{context}) {
		t.Error("of what an older driver staged nothing is known")
	}
}

// TestCheckEndless: a filesystem with which the tools do not come to an end is not checked again by each try of the kubelet.
func TestCheckEndless(t *testing.T) {
	s, checked := New(t.Context(), nil, nil, Options{}), 0
	for range 3 {
		err := s.checks.run(t.Context(), "k", func(context.Context) error {
			checked++
			return fmt.Errorf("%w: %w", errdefs.ErrDataLoss, filesystem.ErrEndless)
		})
		if !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("check: %v", err)
		}
	}
	if checked != 1 {
		t.Errorf("checked %d times", checked)
	}
	if err := s.checks.run(t.Context(), "other", func(context.Context) error { return nil }); err != nil {
		t.Error(err)
	}
}
