package lvmpool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// scriptedLVM is a pool over a program that answers as lvm2 does. With it calls can be made at once under the race detector, which the virtual machines
// that have a device mapper lack. It has the volume unitRef; refuse sets the answer to all commands that would change something.
func scriptedLVM(t *testing.T) (p *pool, refuse func(text string), failFlush func(error)) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	record := blockdev.Record{Ref: unitRef, Name: "a", Size: 4 << 20, Created: time.Unix(1, 0).UTC()}
	tags, err := tagsOf(record, catalog.Ready)
	if err != nil {
		t.Fatal(err)
	}
	write("report", fmt.Sprintf(`{"report":[{"vg":[{"vg_name":"group","vg_uuid":"u","vg_extent_size":"4194304","vg_extent_count":"1000","vg_free_count":"900","vg_missing_pv_count":"0","vg_mda_free":"100","vg_mda_size":"100"}],`+
		`"lv":[{"lv_name":"%s","lv_size":"4194304","lv_health_status":"","lv_tags":"%s","lv_layout":"linear","pool_lv":""}]}],"log":[{"log_type":"status","log_message":"success"}]}`+"\n", unitRef, strings.Join(tags, ",")))
	write("group", `{"report":[{"vg":[{"vg_uuid":"u","pv_uuid":"p"}]}],"log":[{"log_type":"status","log_message":"success"}]}`+"\n")
	write("refusal", "")
	write("lvm", `#!/bin/bash
cd "$(dirname "$0")"
while read -r line; do
	case $line in
	fullreport*) cat report >&3 ;;
	vgs*) cat group >&3 ;;
	lastlog*) echo "{\"log\":[{\"log_type\":\"error\",\"log_message\":\"$(cat refusal)\"}]}" >&3 ;;
	*)
		status=success
		[ ! -s refusal ] || status=failure
		echo "{\"log\":[{\"log_type\":\"status\",\"log_message\":\"$status\"}]}" >&3 ;;
	esac
done
`)
	p = &pool{name: "test", location: Location{Group: "group"}, extent: 4 << 20, Catalog: catalog.New[*logical]("test")}
	var flush error
	p.lvm = lvm2.New(filepath.Join(dir, "lvm"), func(lvm2.Run) {}, func() error { return flush })
	t.Cleanup(p.lvm.Close)
	rows, err := p.reportNow(t.Context())
	if err == nil {
		_, err = p.load(rows)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := p.Lookup(unitRef); err != nil {
		t.Fatalf("%v: this test shows nothing", err)
	}
	return p, func(text string) { write("refusal", text) }, func(err error) { flush = err }
}

// TestLVMAtOnce: many calls at once; the race detector finds nothing.
func TestLVMAtOnce(t *testing.T) {
	p, _, _ := scriptedLVM(t)
	var all sync.WaitGroup
	for _, call := range []func(ctx context.Context, n int){
		func(ctx context.Context, _ int) { _, _ = p.Health(ctx, unitRef) },
		func(ctx context.Context, _ int) { p.PoolHealth(ctx) },
		func(ctx context.Context, _ int) { _, _ = p.Capacity(ctx) },
		func(ctx context.Context, n int) { // without a device mapper it fails, after lvm2 has made the volume
			ref := blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", n)}
			_, _ = p.Create(ctx, blockdev.Spec{Ref: ref, Name: "b", Size: 8 << 20})
			_, _ = p.Health(ctx, ref)
			_ = p.Delete(ctx, ref)
		},
		func(ctx context.Context, n int) { _, _ = p.Expand(ctx, unitRef, int64(n+2)*4<<20) },
	} {
		all.Go(func() {
			for n := range 40 {
				Age(p) // so that each call asks for a report
				call(t.Context(), n)
			}
		})
	}
	all.Wait()
}

// TestLVMDropsBesideSweep: a growth drops the cuts of unfinished copies while a sweep removes these copies. Only one of them works on each copy; if that
// is the sweep, the growth is errdefs.ErrBusy.
func TestLVMDropsBesideSweep(t *testing.T) {
	p, _, _ := scriptedLVM(t)
	ctx := t.Context()
	for n := range 20 {
		ref := blockdev.Ref{Kind: blockdev.Snapshot, Key: fmt.Sprintf("%032x", n)}
		o := &logical{Entry: catalog.Found(blockdev.Record{Ref: ref, Name: "copy", Size: 4 << 20, Origin: unitRef}, catalog.Creating), source: "cut." + ref.String()}
		p.Mu.Lock()
		p.Put(o)
		p.Mu.Unlock()
		var both sync.WaitGroup
		both.Go(func() { p.Sweep(ctx, p.remove) })
		both.Go(func() {
			if err := p.dropCuts(ctx, unitRef); err != nil && !errors.Is(err, errdefs.ErrBusy) {
				t.Error(err)
			}
		})
		both.Wait()
		if err := p.dropCuts(ctx, unitRef); err != nil || o.source != "" {
			t.Fatalf("round %d: the copy still has %q, %v", n, o.source, err)
		}
		p.Mu.Lock()
		p.Forget(o)
		p.Mu.Unlock()
	}
}

// TestLVMOneKind: whatever lvm2 answers, an error of a call wraps one sentinel, the right one for that call.
func TestLVMOneKind(t *testing.T) {
	p, refuse, failFlush := scriptedLVM(t)
	other := blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("b", 32)}
	made := 0 // a new volume each time, as without a device mapper none can be removed
	create := func(origin blockdev.Ref) func() error {
		return func() error {
			made++
			_, err := p.Create(t.Context(), blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", made)}, Name: "b", Size: 8 << 20, Origin: origin})
			return err
		}
	}
	label := func() error {
		_, err := p.SetLabels(t.Context(), unitRef, func(labels map[string]string) error { labels["x"] += "y"; return nil })
		return err
	}
	for _, c := range []struct {
		says string
		call func() error
		want error // nil: none of the sentinels
	}{
		{"Logical Volume b already exists in volume group group", create(blockdev.Ref{}), errdefs.ErrPrecondition},
		{"insufficient free space", create(blockdev.Ref{}), errdefs.ErrNoSpace},
		{"Failed to find logical volume group/a", create(blockdev.Ref{}), errdefs.ErrDataLoss},
		{"Cannot change VG group while PVs are missing", create(blockdev.Ref{}), errdefs.ErrUnavailable},
		{"manual intervention required", create(blockdev.Ref{}), nil},
		{"Failed to find logical volume group/a", label, errdefs.ErrDataLoss},
		{"Failed to write VG", label, errdefs.ErrUnavailable},
		{"is in use", label, errdefs.ErrInUse},
	} {
		refuse(c.says)
		err := c.call()
		kinds := errdefs.Kinds(err)
		if err == nil || len(kinds) > 1 || (c.want != nil && !errors.Is(err, c.want)) || (c.want == nil && len(kinds) > 0) {
			t.Errorf("lvm2 says %q: %v is of the kinds %v; want %v", c.says, err, kinds, c.want)
		}
		refuse("")
		p.Mu.Lock()
		p.Objects[unitRef].missing = false
		p.Mu.Unlock()
	}
	// A flush that fails as the disk is full: nobody knows what is on the disk.
	failFlush(errors.Join(errdefs.FromErrno(os.ErrNotExist), errdefs.ErrNoSpace))
	if err := label(); !errors.Is(err, errdefs.ErrUnavailable) || len(errdefs.Kinds(err)) != 1 {
		t.Errorf("a flush that fails: %v is of the kinds %v", err, errdefs.Kinds(err))
	}
	// A volume with a damaged record is not deleted.
	p.Damaged[other] = fmt.Errorf("%w: noise", catalog.ErrRecord)
	if err := p.Delete(t.Context(), other); !errors.Is(err, errdefs.ErrPrecondition) || len(errdefs.Kinds(err)) != 1 {
		t.Errorf("a damaged record: %v is of the kinds %v", err, errdefs.Kinds(err))
	}
}
