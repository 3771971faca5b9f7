package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// filePool keeps each object as an image file with a record file beside it:
//
//	FOLDER/lock                flock(2) by the one process that may use the pool
//	FOLDER/volumes/KEY.rec     the record (record.go)
//	FOLDER/volumes/KEY.img     the bytes
//	FOLDER/snapshots/KEY.rec, KEY.img
//
// A volume is attached as a loop device. The record goes through creating, ready and
// deleting; an image whose record says creating or deleting belongs to nobody and is
// removed when the pool is opened. An image without a record is never touched.
//
// What is in memory is a cache of the records and of the loop devices, filled when
// the pool is opened and changed only after the disk.
type filePool struct {
	name     string
	location Location
	root     *os.Root
	lock     *os.File
	folders  map[Kind]*os.File // held to be synced
	reflink  bool              // the filesystem can share blocks between files
	kind     int64             // of the filesystem, as in statfs(2)

	mu sync.Mutex
	index[*object]
	damaged map[Ref]error // records that cannot be read
	strays  []string      // images without a record
	loops   map[Ref][]int // loop devices last seen over the object

	space space
}

// object is what is known of one record file.
type object struct {
	stored     *stored
	generation uint64
	copied     int64     // bytes of an unfinished copy that are in place
	cut        time.Time // of the origin of that copy
	active     bool      // somebody is making it ready, or removing it
	touched    time.Time // of an unfinished copy: when it was last worked on; zero if only its removal is left
	allocated  int64     // bytes of the filesystem that the image took when last measured
}

func (o *object) size() int64 { return max(o.stored.Size, o.stored.Growing) }

var folderNames = map[Kind]string{Volume: "volumes", Snapshot: "snapshots"}

func recordPath(ref Ref) string { return folderNames[ref.Kind] + "/" + ref.Key + ".rec" }
func imagePath(ref Ref) string  { return folderNames[ref.Kind] + "/" + ref.Key + ".img" }

// label of the loop devices over an object: with it, a device tells its volume
// without any record.
func (p *filePool) label(ref Ref) string {
	return string(ref.Kind) + "." + p.name + "." + ref.Key
}

func openFilePool(ctx context.Context, name string, loc Location) (_ Pool, err error) {
	p := &filePool{name: name, location: loc, folders: map[Kind]*os.File{}, index: newIndex[*object](), damaged: map[Ref]error{}, loops: map[Ref][]int{}}
	p.space.unfinished = map[Ref]bool{}
	defer func() {
		if err != nil {
			p.Close()
			err = fmt.Errorf("open pool %s at %s: %w", name, loc.Path, err)
		}
	}()
	if loc.Create == 0 {
		for _, folder := range folderNames {
			if _, err := os.Stat(loc.Path + "/" + folder); err != nil {
				return nil, fmt.Errorf("%w: there is no pool, and create=0 says to make none; is its filesystem mounted? %w", ErrUnavailable, err)
			}
		}
	}
	if err := os.MkdirAll(loc.Path, 0o700); err != nil {
		return nil, systemError(err)
	}
	if p.root, err = os.OpenRoot(loc.Path); err != nil {
		return nil, systemError(err)
	}
	if p.lock, err = p.root.OpenFile("lock", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, systemError(err)
	}
	if err := unix.Flock(int(p.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: another process uses this folder as a pool", ErrInUse)
		}
		return nil, systemError(err)
	}
	for kind, folder := range folderNames {
		if err := p.root.Mkdir(folder, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, systemError(err)
		}
		if p.folders[kind], err = p.root.Open(folder); err != nil {
			return nil, systemError(err)
		}
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.lock.Fd()), &st); err != nil {
		return nil, systemError(err)
	}
	p.kind = st.Type
	p.reflink = canReflink(p.lock)
	for kind := range folderNames {
		if err := p.load(kind); err != nil {
			return nil, err
		}
	}
	if err := p.findLoops(); err != nil {
		return nil, err
	}
	p.sweep(ctx)
	return p, nil
}

// load reads all records of a kind.
func (p *filePool) load(kind Kind) error {
	entries, err := fs.ReadDir(p.root.FS(), folderNames[kind])
	if err != nil {
		return systemError(err)
	}
	images := map[string]bool{}
	for _, entry := range entries {
		if key, ok := strings.CutSuffix(entry.Name(), ".img"); ok {
			images[key] = true
		}
	}
	for _, entry := range entries {
		key, ok := strings.CutSuffix(entry.Name(), ".rec")
		ref := Ref{kind, key}
		if !ok || ref.validate() != nil {
			continue
		}
		s, generation, err := readRecord(p.root, recordPath(ref))
		if err == nil && s.decoded.Ref != ref {
			err = fmt.Errorf("%w: %s says it is of %s", errRecord, recordPath(ref), s.decoded.Ref)
		}
		switch {
		case err == nil:
			p.insert(&object{stored: s, generation: generation})
		case errors.Is(err, errEmpty) && !images[key]:
			// A crash before the record was on disk; nothing was ever handed out.
			if err := p.root.Remove(recordPath(ref)); err != nil {
				return systemError(err)
			}
		default:
			p.damaged[ref] = err
		}
		delete(images, key)
	}
	for key := range images {
		p.strays = append(p.strays, folderNames[kind]+"/"+key+".img")
	}
	return nil
}

// insert adds an object to the index and to what is promised. The caller holds mu,
// or is alone.
func (p *filePool) insert(o *object) {
	p.put(o.stored.decoded.Ref, o)
	p.space.promised += o.size()
}

func (p *filePool) forget(ref Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.objects[ref]
	entangled := p.entangled()(o)
	p.index.remove(ref)
	delete(p.space.unfinished, ref)
	p.space.promised -= o.size()
	p.space.allocated -= o.allocated
	if entangled {
		p.space.measured = time.Time{}
	}
}

// sweep finishes what a crash, or a caller that never came back, left half-done.
// A failure is left for the next sweep: it costs space, not data.
func (p *filePool) sweep(ctx context.Context) {
	p.mu.Lock()
	var unfinished []Ref
	for ref, o := range p.objects {
		if o.stored.State != ready {
			unfinished = append(unfinished, ref)
		} else if o.stored.Growing != 0 {
			unfinished = append(unfinished, ref)
		}
	}
	p.mu.Unlock()
	for _, ref := range unfinished {
		var err error
		if o := p.find(ref); o.stored.State == ready {
			_, err = p.Expand(ctx, ref, o.stored.Growing)
		} else {
			err = p.remove(ref)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not finish what was left half-done; the next start tries again", "pool", p.name, "object", ref.String())
		}
	}
}

// abandonedAfter is when an unfinished copy that nobody came back for is given up.
const abandonedAfter = 15 * time.Minute

// sweepAbandoned gives up unfinished copies that nobody works on any more, and ends
// removals that failed half-way.
func (p *filePool) sweepAbandoned(ctx context.Context) {
	p.mu.Lock()
	var abandoned []Ref
	for ref := range p.space.unfinished {
		if o := p.objects[ref]; o != nil && !o.active && time.Since(o.touched) > abandonedAfter {
			o.active = true
			abandoned = append(abandoned, ref)
		}
	}
	p.mu.Unlock()
	for _, ref := range abandoned {
		if err := p.remove(ref); err != nil {
			klog.FromContext(ctx).Error(err, "could not remove what is left of an object; the next call tries again", "pool", p.name, "object", ref.String())
		}
	}
}

func (p *filePool) Name() string { return p.name }

func (p *filePool) Granularity() int64 { return Granularity }

func (p *filePool) find(ref Ref) *object {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.objects[ref]
}

// lookup returns a ready object and its record; a stored is never changed, only
// replaced.
func (p *filePool) lookup(ref Ref) (*object, *stored, error) {
	if err := ref.validate(); err != nil {
		return nil, nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.damaged[ref]; err != nil {
		return nil, nil, fmt.Errorf("pool %s: %w", p.name, err)
	}
	o := p.objects[ref]
	if o == nil || o.stored.State != ready {
		return nil, nil, fmt.Errorf("%w: no %s in pool %s", ErrNotFound, ref, p.name)
	}
	return o, o.stored, nil
}

func (p *filePool) Get(_ context.Context, ref Ref) (Record, error) {
	_, s, err := p.lookup(ref)
	if err != nil {
		return Record{}, err
	}
	return copyOf(s.decoded), nil
}

func (p *filePool) List(_ context.Context, kind Kind, after string, limit int) ([]Record, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.list(kind, after, limit, func(o *object) Record { return o.stored.decoded }), nil
}

// save writes a record over the one of o, on disk and then in memory.
func (p *filePool) save(o *object, s *stored) error {
	generation, err := updateRecord(p.root, recordPath(s.decoded.Ref), s, o.generation)
	if err != nil {
		return fmt.Errorf("write the record of %s in pool %s: %w", s.decoded.Ref, p.name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.space.promised -= o.size()
	o.stored, o.generation = s, generation
	p.space.promised += o.size()
	return nil
}

func (p *filePool) SetLabels(_ context.Context, ref Ref, change func(map[string]string) error) (Record, error) {
	o, s, err := p.lookup(ref)
	if err != nil {
		return Record{}, err
	}
	record, err := changeLabels(s.decoded, change)
	if err != nil || maps.Equal(record.Labels, s.Labels) {
		return record, err
	}
	if err := p.save(o, newStored(record, ready, s.Growing)); err != nil {
		return Record{}, err
	}
	return copyOf(record), nil
}

func (p *filePool) Delete(ctx context.Context, ref Ref) error {
	if err := ref.validate(); err != nil {
		return err
	}
	p.mu.Lock()
	damaged, o := p.damaged[ref], p.objects[ref]
	p.mu.Unlock()
	if damaged != nil {
		return fmt.Errorf("%w: %s in pool %s is not deleted, because its record cannot be read (%w): look at %s, and remove it and the image by hand if nobody needs them",
			ErrPrecondition, ref, p.name, damaged, recordPath(ref))
	}
	if o == nil {
		return nil
	}
	if devices, err := p.Attached(ctx, ref); err != nil {
		return err
	} else if len(devices) > 0 {
		return fmt.Errorf("%w: %s in pool %s is attached as %s", ErrInUse, ref, p.name, devices[0].Path)
	}
	p.mu.Lock()
	busy := o.active
	o.active = true
	p.mu.Unlock()
	if busy {
		return fmt.Errorf("delete %s in pool %s: %w", ref, p.name, ErrBusy)
	}
	return p.remove(ref)
}

// remove takes the bytes away, then the record. Unlinked files need no sync of the
// folder: should a power cut bring them back, the record still says deleting (or
// creating) and the next start removes them again.
//
// The space has to be back before that is said: XFS frees unlinked files in the
// background, but a truncated one at once; btrfs counts space as free from its next
// commit on.
//
// The object is nobody's from the moment its record says so. What fails after that is
// tried again by the next Create or Capacity, as the caller may not come back.
func (p *filePool) remove(ref Ref) error {
	o := p.find(ref)
	if o == nil {
		return nil
	}
	if err := p.removeFiles(ref, o); err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		o.active, o.touched = false, time.Time{}
		if o.stored.State != ready {
			p.space.unfinished[ref] = true
		}
		return err
	}
	p.forget(ref)
	return nil
}

func (p *filePool) removeFiles(ref Ref, o *object) error {
	o.copied = 0 // there is nothing to go on with any more
	if o.stored.State == ready {
		if err := p.save(o, newStored(o.stored.decoded, deleting, o.stored.Growing)); err != nil {
			return err
		}
	}
	if err := p.empty(imagePath(ref)); err != nil {
		return fmt.Errorf("empty the image of %s in pool %s: %w", ref, p.name, systemError(err))
	}
	for _, path := range []string{imagePath(ref), recordPath(ref)} {
		if err := p.root.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove %s from pool %s: %w", path, p.name, systemError(err))
		}
	}
	return nil
}

func (p *filePool) empty(path string) error {
	if p.kind != unix.XFS_SUPER_MAGIC && p.kind != unix.BTRFS_SUPER_MAGIC {
		return nil
	}
	image, err := p.root.OpenFile(path, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer image.Close()
	if err := image.Truncate(0); err != nil || p.kind != unix.BTRFS_SUPER_MAGIC {
		return err
	}
	return unix.Syncfs(int(image.Fd()))
}

func (p *filePool) Close() error {
	var failures []error
	if p.lock != nil {
		failures = append(failures, p.lock.Close())
	}
	for _, folder := range p.folders {
		if folder != nil {
			failures = append(failures, folder.Close())
		}
	}
	if p.root != nil {
		failures = append(failures, p.root.Close())
	}
	return errors.Join(failures...)
}
