package lvmpool_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A process that uses a pool is killed, alone, with its lvm2, or only its lvm2. A journal has what it did and was doing; the pool is compared with that
// afterwards.

// step is a line of the journal, which is written before something is done, and again when it is done.
type step struct {
	Done    bool
	What    string
	Ref     blockdev.Ref
	Origin  blockdev.Ref // of a copy
	Content string       // what fills the object afterwards; empty: not known
	Size    int64
	Label   string
	Failed  string // what the pool said when lvm2 was killed
}

// scribbled is the length of the end of each object that others may be writing to, in bytes.
const scribbled = 64 << 10

const (
	killChild  = "ASHLAR_LVM_KILL_CHILD"
	killWriter = "ASHLAR_LVM_KILL_WRITER"
)

// TestLVMKillWriter stands for a pod: for each line of its input it begins to write to the device of the line, at an offset, until the next line, and
// answers the line. It is a process of its own, as a writer to a suspended device does not end before that is resumed.
func TestLVMKillWriter(t *testing.T) {
	if os.Getenv(killWriter) == "" {
		t.Skip("it is started by TestLVMKillChild")
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for input := bufio.NewScanner(os.Stdin); input.Scan(); {
			lines <- input.Text()
		}
	}()
	var device string
	var offset int64
	for n := 0; ; n++ {
		select {
		case line, more := <-lines:
			if !more {
				return
			}
			device, offset = "", 0
			_, _ = fmt.Sscan(line, &device, &offset)
			fmt.Println()
		case <-time.After(time.Millisecond):
			if device != "" {
				_ = writeDirect(device, offset, marked(strconv.Itoa(n%1000), 4096))
			}
		}
	}
}

// startWriter starts TestLVMKillWriter, which ends with this process.
func startWriter(t testing.TB) (tell func(line string)) {
	t.Helper()
	writer := exec.Command(os.Args[0], "-test.run=^TestLVMKillWriter$")
	writer.Env = append(os.Environ(), killWriter+"=1")
	input, err := writer.StdinPipe()
	check.OK(t, err)
	output, err := writer.StdoutPipe()
	check.OK(t, err)
	check.OK(t, writer.Start())
	answers := bufio.NewReader(output)
	return func(line string) {
		_, err := fmt.Fprintln(input, line)
		check.OK(t, err)
		_, err = answers.ReadString('\n')
		check.OK(t, err)
	}
}

// TestLVMKillChild is the process that is killed.
func TestLVMKillChild(t *testing.T) {
	url := os.Getenv(killChild)
	if url == "" {
		t.Skip("it is started by TestLVMKill")
	}
	seed, err := strconv.ParseUint(os.Getenv("ASHLAR_SEED"), 10, 64)
	check.OK(t, err)
	r := rand.New(rand.NewPCG(seed, 1))
	journal, err := os.OpenFile(os.Getenv("ASHLAR_JOURNAL"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	check.OK(t, err)
	write := func(s step) {
		line, err := json.Marshal(s)
		check.OK(t, err)
		_, err = journal.Write(append(line, '\n'))
		check.OK(t, err)
	}
	tellWriter := startWriter(t)
	pool := pooltest.OpenURL(t, url)
	ctx := context.Background()
	stacks := device.New()
	attach := func(ref blockdev.Ref, readOnly, keep bool) (blockdev.Device, error) {
		if readOnly {
			return pool.Attach(ctx, ref, blockdev.Attachment{ReadOnly: true})
		}
		return stacks.Of(pool, ref).Attach(ctx, device.Options{Keep: keep})
	}
	known := map[blockdev.Ref]step{}
	var keep []blockdev.Device
	do := func(s step, work func() error) {
		write(s)
		for try := range 50 {
			err := work()
			if err == nil {
				break
			}
			if try == 49 {
				t.Fatalf("%+v: %v", s, err)
			}
			write(step{What: "failed", Ref: s.Ref, Failed: fmt.Sprintf("%s: %v (unavailable: %v)", s.What, err, errors.Is(err, errdefs.ErrUnavailable))})
		}
		s.Done = true
		if s.What == "delete" {
			delete(known, s.Ref)
		} else {
			known[s.Ref] = s
		}
		write(s)
	}
	const largest = 6 * extentSize // so that the pool has room for as many as there may be
	for n := 0; ; n++ {
		ref := blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", n)}
		var some, volume step
		refs := slices.SortedFunc(maps.Keys(known), func(a, b blockdev.Ref) int { return strings.Compare(a.String(), b.String()) })
		r.Shuffle(len(refs), func(i, j int) { refs[i], refs[j] = refs[j], refs[i] })
		for _, ref := range refs {
			some = known[ref]
			if ref.Kind == blockdev.Volume {
				volume = some
			}
		}
		what := []string{"create", "copy", "copy", "snapshot", "snapshot", "expand", "expand", "labels", "keep", "attach", "delete"}[r.IntN(11)]
		if volume.Size == 0 {
			what = "create"
		}
		if len(known) > 5 {
			what = "delete"
		}
		switch what {
		case "create":
			s := step{What: what, Ref: ref, Size: 2 * extentSize, Label: "new"}
			do(s, func() error {
				return pooltest.Second(pool.Create(ctx, blockdev.Spec{Ref: ref, Name: ref.String(), Size: s.Size, Labels: map[string]string{"l": s.Label}}))
			})
			s.Content = ref.Key[20:]
			do(s, func() error {
				device, err := attach(ref, false, false)
				if err != nil {
					return err
				}
				return errors.Join(writeDirect(device.Path, 0, marked(s.Content, s.Size-scribbled)), device.Close())
			})
		case "copy", "snapshot":
			from := some
			if what == "snapshot" {
				from, ref.Kind = volume, blockdev.Snapshot
			}
			from.What, from.Ref, from.Done = what, ref, false
			origin := some.Ref
			if what == "copy" && from.Size < largest {
				from.Size += extentSize * int64(r.IntN(2))
			} else if what == "snapshot" {
				origin = volume.Ref
			}
			from.Origin = origin
			device, err := attach(origin, origin.Kind == blockdev.Snapshot, false)
			if err != nil {
				continue
			}
			if origin.Kind == blockdev.Volume {
				tellWriter(fmt.Sprint(device.Path, " ", known[origin].Size-scribbled))
			}
			do(from, func() error {
				return pooltest.Second(pool.Create(ctx, blockdev.Spec{Ref: ref, Name: ref.String(), Size: from.Size, Origin: origin, Labels: map[string]string{"l": from.Label}}))
			})
			tellWriter("")
			_ = device.Close()
		case "expand":
			if volume.Size >= largest {
				continue
			}
			volume.What, volume.Done, volume.Size = what, false, volume.Size+extentSize
			do(volume, func() error {
				if _, err := pool.Expand(ctx, volume.Ref, volume.Size); err != nil {
					return err
				}
				return stacks.Of(pool, volume.Ref).Grow(ctx, nil)
			})
		case "labels":
			some.What, some.Done, some.Label = what, false, fmt.Sprint("label ", n)
			do(some, func() error {
				return pooltest.Second(pool.SetLabels(ctx, some.Ref, func(l map[string]string) error { l["l"] = some.Label; return nil }))
			})
		case "keep", "attach":
			some.What, some.Done = what, false
			readOnly := what == "attach" && r.IntN(2) == 0
			do(some, func() error {
				device, err := attach(some.Ref, readOnly, what == "keep")
				if errors.Is(err, errdefs.ErrInUse) {
					return stacks.Of(pool, some.Ref).Detach(ctx)
				}
				keep = append(keep, device)
				return err
			})
			for _, device := range keep[:len(keep)/2] {
				_ = device.Close()
			}
			keep = keep[len(keep)/2:]
			if r.IntN(2) == 0 {
				for _, device := range keep {
					_ = device.Close()
				}
				keep = nil
				do(some, func() error { return stacks.Of(pool, some.Ref).Detach(ctx) })
			}
		case "delete":
			for _, device := range keep {
				_ = device.Close()
			}
			keep = nil
			some.What, some.Done = what, false
			do(some, func() error { return errors.Join(stacks.Of(pool, some.Ref).Detach(ctx), pool.Delete(ctx, some.Ref)) })
		}
	}
}

// replay returns the last step of each object that was done, by the journal (was); the last step of all, done or not; what the pool said when lvm2 was
// killed; and which objects may be kept.
func replay(t testing.TB, path string) (was map[blockdev.Ref]step, last step, failures []string, kept map[blockdev.Ref]bool) {
	t.Helper()
	was, kept = map[blockdev.Ref]step{}, map[blockdev.Ref]bool{}
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return was, last, nil, kept
	}
	check.OK(t, err)
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var s step
		if json.Unmarshal(lines.Bytes(), &s) != nil {
			continue // the last one
		}
		switch {
		case s.What == "failed":
			failures = append(failures, s.Failed)
			continue
		case s.Done && s.What == "delete":
			delete(was, s.Ref)
		case s.Done:
			was[s.Ref] = s
		}
		if s.What == "keep" {
			kept[s.Ref] = true
		}
		last = s
	}
	return was, last, failures, kept
}

// TestLVMKill: whoever is killed, and whenever: what was done stays, what was being done is done or not, and nothing else is left.
func TestLVMKill(t *testing.T) {
	total := 25 * time.Second
	if s, err := time.ParseDuration(os.Getenv("ASHLAR_LVM_KILL")); err == nil {
		total = s
	}
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("ASHLAR_SEED"), 10, 64); err == nil {
		seed = s
	}
	onLVM(t, func(f *lvmFixture) {
		f.Logf("ASHLAR_SEED=%d", seed)
		r := rand.New(rand.NewPCG(seed, 2))
		dir := drivertest.Dir(f)
		check.OK(f, f.pool.Close())
		f.pool = nil
		rounds := 0
		counts := map[string]int{}
		for start := time.Now(); time.Since(start) < total/2 && !f.Failed(); rounds++ {
			journal := filepath.Join(dir, fmt.Sprint("journal", rounds))
			child := exec.Command(os.Args[0], "-test.run=^TestLVMKillChild$", "-test.timeout=5m")
			child.Env = append(os.Environ(), killChild+"="+f.url, "ASHLAR_JOURNAL="+journal, fmt.Sprint("ASHLAR_SEED=", r.Uint64()))
			var output bytes.Buffer
			child.Stdout, child.Stderr = &output, &output
			check.OK(f, child.Start())
			for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
				if info, err := os.Stat(journal); err == nil && info.Size() > 0 {
					break
				}
			}
			mode := []string{"driver", "both", "lvm"}[rounds%3]
			if mode == "lvm" {
				for range 3 {
					time.Sleep(time.Duration(r.IntN(500)) * time.Millisecond)
					for _, pid := range lvmChildren(child.Process.Pid) {
						_ = syscall.Kill(pid, syscall.SIGKILL)
					}
				}
			}
			time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
			lvms := lvmChildren(child.Process.Pid)
			if child.ProcessState != nil || syscall.Kill(child.Process.Pid, 0) != nil {
				f.Errorf("the child ended by itself: %s", output.String())
			}
			_ = child.Process.Kill()
			if mode == "both" {
				for _, pid := range lvms {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
			_ = child.Wait()
			if out := output.String(); strings.Contains(out, "FAIL") || strings.Contains(out, "panic") {
				f.Errorf("round %d: the child failed: %s", rounds, out)
			}
			f.afterKill(journal, mode, lvms)
			_, last, failures, _ := replay(f, journal)
			counts[mode+" during "+last.What]++
			for _, failure := range failures {
				if mode != "lvm" || !strings.Contains(failure, "(unavailable: true)") {
					f.Errorf("round %d, %s killed: %s", rounds, mode, failure)
				}
			}
		}
		f.Logf("%d rounds: %v", rounds, counts)
		f.pool = pooltest.OpenURL(f, f.url)
	})
}

// afterKill opens the pool, checks all objects, and removes them.
func (f *lvmFixture) afterKill(journal, mode string, lvms []int) {
	f.Helper()
	for _, pid := range lvms {
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil || strings.Contains(string(stat), ") Z ") {
				break
			}
			if time.Now().After(deadline) {
				f.Fatalf("lvm %d outlives its driver", pid)
			}
			if mode == "driver" {
				break // the next driver starts while the last one's lvm2 still ends
			}
		}
	}
	ctx := context.Background()
	f.pool = pooltest.OpenURL(f, f.url)
	stacks := device.New()
	check.OK(f, stacks.Recover(ctx, f.pool))
	was, last, _, kept := replay(f, journal)
	what := fmt.Sprintf("%s killed during %+v", mode, last)
	for _, volume := range f.lv("lv_name,lv_tags") {
		if strings.Contains(volume, "state=") || strings.HasPrefix(volume, "grow.") || strings.HasPrefix(volume, "cut.") {
			f.Errorf("%s: left: %s", what, volume)
		}
	}
	for _, name := range strings.Fields(drivertest.Run(f, "dmsetup", "info", "-c", "--noheadings", "-o", "name", "-S", "suspended=1")) {
		if strings.Contains(name, strings.ReplaceAll(f.group.Name, "-", "--")) {
			f.Errorf("%s: suspended: %s", what, name)
		}
	}
	orphans, err := stacks.Orphans(ctx, f.pool)
	check.OK(f, err)
	for ref, devices := range orphans {
		check.OK(f, stacks.Of(f.pool, ref).Detach(ctx))
		// Nobody can say whether an object that was being attached is kept, and between two steps that may be any object.
		if !kept[ref] && mode != "lvm" && !last.Done && ref != last.Ref && ref != last.Origin {
			f.Errorf("%s: %v of %s were not to be kept", what, devices, ref)
		}
	}
	for deadline := time.Now().Add(time.Minute); len(f.group.DeviceNames()) > 0 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	for _, name := range f.group.DeviceNames() {
		f.Errorf("%s: a device is left that is not kept: %s", what, name)
	}
	var promised int64
	have := map[blockdev.Ref]blockdev.Record{}
	for _, r := range f.all() {
		have[r.Ref] = r
		promised += r.Size
	}
	if c := pooltest.CapacityOf(f, f.pool); c.Promised != promised {
		f.Errorf("%s: %d bytes are promised, the records say %d", what, c.Promised, promised)
	}
	for ref, s := range was {
		record, ok := have[ref]
		mine := !last.Done && last.Ref == ref
		switch {
		case !ok && !(mine && last.What == "delete"):
			f.Errorf("%s: %s is gone", what, ref)
			continue
		case !ok:
			continue
		case record.Size != s.Size && !(mine && record.Size == last.Size), record.Labels["l"] != s.Label && !(mine && record.Labels["l"] == last.Label):
			f.Errorf("%s: record %+v, want %+v", what, record, s)
		}
		f.full(what, record, s.Content, mine && last.What == "create")
	}
	for ref, record := range have {
		if _, ok := was[ref]; ok {
			continue
		}
		if last.Done || last.Ref != ref {
			f.Errorf("%s: %+v was never made", what, record)
			continue
		}
		f.full(what, record, last.Content, false)
	}
	if !last.Done && (last.What == "copy" || last.What == "snapshot" || last.What == "create") && have[last.Ref].Size == 0 {
		f.make(last.Ref, 2*extentSize) // the retry; its origin is not known
	}
	f.empty()
	if c := pooltest.CapacityOf(f, f.pool); c.Promised != 0 {
		f.Errorf("%s: %d bytes are promised in the end", what, c.Promised)
	}
	check.OK(f, f.pool.Close())
	f.pool = nil
}

// full checks the bytes of an object: what was written, and then zeros, except where others scribbled.
func (f *lvmFixture) full(what string, r blockdev.Record, content string, writing bool) {
	f.Helper()
	const first = 2*extentSize - scribbled
	b := f.read(r.Ref, 0, r.Size)
	if content != "" && !bytes.Equal(b[:first], marked(content, first)) && !writing {
		f.Errorf("%s: %s does not hold %q", what, r.Ref, content)
	}
	if content == "" && !writing && len(bytes.Trim(b, "\x00")) > 0 {
		f.Errorf("%s: %s is not zero", what, r.Ref)
	}
	for at := int64(first); at < r.Size; at += 4096 {
		if part := b[at : at+4096]; len(bytes.Trim(part, "\x00")) > 0 && bytes.Contains(part, []byte("0000000")) {
			f.Errorf("%s: %s has another's bytes at %d: %.40q", what, r.Ref, at, part)
			break
		}
	}
}
