// Package luks makes and opens encrypted devices with LUKS2, by the program cryptsetup(8). The header is on the device itself, before the data.
//
// A key goes to cryptsetup by its standard input, and nowhere else: it is on no command line, in no file and in no error. The kernel keeps in its own
// memory what it needs of it, and the tables of devices do not show that (cryptsetup's keyring).
package luks

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// HeaderSize is where the data begins on a device that Format made, in bytes: cryptsetup's own choice, which leaves room to encrypt anew in place.
const HeaderSize = 16 << 20

// UUIDPrefix begins the UUID of each device of the device mapper that Open makes.
const UUIDPrefix = "CRYPT-LUKS2-"

// Written is how much of the header area Format writes, in bytes: two copies of the metadata, and room for 16 keys. Format overwrites all of that with
// random bytes first, so it is no larger than needed.
const (
	Written      = 4 << 20
	metadataSize = 16 << 10
)

var (
	// ErrKey is for a key that opens none of the key slots.
	ErrKey = errors.New("the key opens none of the key slots of its LUKS2 header")
	// ErrNoKey is for a call that needs a key and has none.
	ErrNoKey = errors.New("it is encrypted, and no key was given")
)

// Key opens a key slot. Printed or encoded, it shows nothing of itself.
type Key []byte

// Format makes every verb print "a key", or "no key".
func (k Key) Format(f fmt.State, _ rune) {
	if len(k) == 0 {
		_, _ = io.WriteString(f, "no key")
	} else {
		_, _ = io.WriteString(f, "a key")
	}
}

// MarshalText makes encoders write what Format prints.
func (k Key) MarshalText() ([]byte, error) { return fmt.Append(nil, k), nil }

// Available returns errdefs.ErrUnsupported if this machine lacks what encrypted devices need, which the error names.
func Available() error {
	if _, err := command.Find("cryptsetup"); err != nil {
		return fmt.Errorf("%w: encryption needs the program cryptsetup: %w; install it", errdefs.ErrUnsupported, err)
	}
	err := dm.HasTarget("crypt")
	if err == nil || errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) {
		return err
	}
	return errdefs.Recast(errdefs.ErrUnsupported, err, "encryption needs dm-crypt; load the kernel's modules dm-mod and dm-crypt")
}

const cipherName = "aes-xts-plain64"

// How a header is made.
//
// The key is stretched by Argon2id as RFC 9106 recommends where memory is bounded (its second choice: 64 MiB, four lanes; four passes, as cryptsetup takes
// no fewer). The numbers are fixed: so no benchmark runs at each format, and a fast machine makes no header that a slow one opens in minutes. An open
// takes about 0.15 s of one processor of 2026 (0.16 s of user time on the machine of docs/benchmarks/logical.md; 2.2 s in User Mode Linux).
//
// Sectors have 4096 bytes: every size is a multiple of that, and no disk has larger ones. So the volume has such sectors over any disk, and its copies can
// be moved to any other.
var (
	cipher   = []string{"--cipher", cipherName, "--key-size", "512", "--sector-size", "4096"}
	stretch  = []string{"--pbkdf", "argon2id", "--pbkdf-memory", "65536", "--pbkdf-parallel", "4", "--pbkdf-force-iterations", "4"}
	geometry = []string{"--luks2-metadata-size", strconv.Itoa(metadataSize), "--luks2-keyslots-size", strconv.Itoa(Written - 2*metadataSize), "--offset", strconv.Itoa(HeaderSize / 512)}
)

// Format makes a header with one key on a device, whatever is there. From then on the data behind it reads as noise.
func Format(ctx context.Context, device, uuid string, key Key) error {
	argv := []string{"luksFormat", "--type", "luks2", "--uuid", uuid}
	for _, options := range [][]string{cipher, stretch, geometry} {
		argv = append(argv, options...)
	}
	if err := withKey(ctx, key, append(argv, device)...); err != nil {
		return fmt.Errorf("make a LUKS2 header on %s: %w", device, err)
	}
	if err := fsync.AndClose(os.Open(device)); err != nil {
		return fmt.Errorf("make the LUKS2 header on %s durable: %w", device, errdefs.FromErrno(err))
	}
	// A formatted volume is never formatted again: so the header is checked, whatever cryptsetup says.
	if have, err := UUID(device); err != nil || have != uuid {
		return errors.Join(fmt.Errorf("make a LUKS2 header on %s: cryptsetup ended as if it had, and there is the UUID %q, not %s", device, have, uuid), err)
	}
	return nil
}

// Opens reports whether a device has a header that the key opens. False if no key can open it: it is not whole, or has no key slot yet. ErrKey if only
// another key opens it.
func Opens(ctx context.Context, device string, key Key) (bool, error) {
	header, err := find(device)
	if err == nil {
		err = header.sound(device)
	}
	if err != nil || !header.whole || len(header.slots) == 0 {
		return false, err
	}
	if err := withKey(ctx, key, "open", "--type", "luks2", "--test-passphrase", device); err != nil {
		return false, fmt.Errorf("try the key of the LUKS2 header of %s: %w", device, err)
	}
	return true, nil
}

// Open makes a device of the device mapper that shows the data behind the header of a device. ErrKey for a wrong key. If it fails, or is killed, a device
// of that name may be left, also without a table.
//
// Nothing in a header proves what it says: whoever can write to the disk can make it say "no cipher", or have every key open a key slot of theirs, and then
// read all that is written later. So nothing is opened that is not sound, and the kernel is asked what was opened: errdefs.ErrPrecondition unless that is
// what Format makes. errdefs.ErrDataLoss as for Check.
//
// The kernel's queues for reads and writes stay (no --perf-no_read_workqueue, no --perf-no_write_workqueue): without them whoever submits the I/O encrypts
// it, which is said to be faster for one reader of a fast disk, and slower for one writer on many processors. On one processor it makes no difference
// (docs/benchmarks/logical.md).
func Open(ctx context.Context, device, name string, key Key, discards bool) error {
	argv := []string{"open", "--type", "luks2"}
	if discards {
		argv = append(argv, "--allow-discards")
	}
	header, err := usable(device)
	if err == nil {
		err = withKey(ctx, key, append(argv, device, name)...)
		err = errors.Join(err, ForgetNode(name))
	}
	if err == nil {
		err = verify(name, header.uuid)
	}
	if err != nil {
		return fmt.Errorf("open the LUKS2 header of %s: %w", device, err)
	}
	return nil
}

// verify returns errdefs.ErrPrecondition unless a device that cryptsetup made is of the header with a UUID, and shows its data with the cipher and offset
// of Format.
func verify(name, uuid string) error {
	d, err := dm.Find(name)
	if err != nil || d == nil {
		return errors.Join(err, fmt.Errorf("cryptsetup ended as if it had made device %s, and there is none", name))
	}
	kind, arguments, err := dm.Table(name)
	if err != nil {
		return err
	}
	fields := strings.Fields(arguments) // CIPHER KEY IV-OFFSET DEVICE OFFSET ... (dm-crypt of the kernel's documentation)
	switch {
	case d.Targets != 1 || kind != "crypt" || len(fields) < 5:
		return fmt.Errorf("%w: it opens as %d targets of the device mapper, the first of them %q, not as one of dm-crypt; "+notOurs, errdefs.ErrPrecondition, d.Targets, kind)
	case fields[0] != cipherName || fields[4] != strconv.Itoa(HeaderSize/512):
		return fmt.Errorf("%w: it opens with the cipher %s from sector %s on, not with %s from %d on; "+notOurs, errdefs.ErrPrecondition, fields[0], fields[4], cipherName, HeaderSize/512)
	case !strings.HasPrefix(d.UUID, UUIDPrefix+strings.ReplaceAll(uuid, "-", "")+"-"):
		return fmt.Errorf("%w: it opens as %s, and its UUID is %s; "+notOurs, errdefs.ErrPrecondition, d.UUID, uuid)
	}
	return nil
}

const notOurs = "somebody has changed the header on the disk: restore it (cryptsetup luksHeaderRestore), and find out who can write there"

// Resize gives a device that Open made over another one the size of that. It needs the key, as the kernel gives none to a new table: cryptsetup reads it
// from the header anew, which has to be as for Open.
func Resize(ctx context.Context, device, name string, key Key) error {
	header, err := usable(device)
	forget := func() error { return nil }
	if err == nil {
		forget, err = nodesBelow(name)
	}
	if err == nil {
		err = withKey(ctx, key, "resize", name)
	}
	err = errors.Join(err, forget(), ForgetNode(name))
	if err == nil {
		err = verify(name, header.uuid)
	}
	if err != nil {
		return fmt.Errorf("grow device %s behind its LUKS2 header: %w", name, err)
	}
	return nil
}

// SetUUID gives a header, on a device or in a file, another UUID, durably. It needs no key.
func SetUUID(ctx context.Context, path, uuid string) error {
	have, err := UUID(path)
	if err == nil && have != uuid {
		if _, _, err = run(ctx, nil, "luksUUID", "--uuid", uuid, path); err == nil {
			have, err = UUID(path)
		}
	}
	if err == nil && have != uuid {
		err = fmt.Errorf("cryptsetup ended as if it had, and it is %q", have)
	}
	if err == nil {
		err = errdefs.FromErrno(fsync.AndClose(os.Open(path)))
	}
	if err != nil {
		return fmt.Errorf("give the LUKS2 header of %s the UUID %s: %w", path, uuid, err)
	}
	return nil
}

// The binary header (LUKS2 On-Disk Format Specification, 2.1). It begins with the magic, which differs in the second copy. It has a sequence number that
// grows with each change, its size, the UUID, and the checksum of all the metadata, which counts itself as zeros. A JSON text follows it.
var magics = map[int64][]byte{0: []byte("LUKS\xba\xbe\x00\x02"), metadataSize: []byte("SKUL\xba\xbe\x00\x02")}

const (
	sizeAt        = 8
	sequenceAt    = 16
	algorithmAt   = 72
	algorithmSize = 32
	uuidAt        = 168
	uuidSize      = 40
	sumAt         = 448
	sumSize       = 64
	textAt        = 4096

	algorithmName = "sha256" // what cryptsetup makes the checksum by
)

// metadata is what one copy of a header has.
type metadata struct {
	uuid     string
	whole    bool
	odd      string // what no tool writes over a header of Format, and a power cut does not leave either; empty if there is nothing
	sequence uint64
	slots    []slot // the key slots, if the copy is whole
	both     []slot // those of the other copy, too
}

// slot is a key slot.
type slot struct {
	name   string
	kind   string
	cipher string // that the volume's key is encrypted with in it
	// How its own key is stretched: memory in KiB, passes over that; or iterations.
	memory, passes, iterations uint64
}

// The most that a key slot may ask for. A person who adds a key with cryptsetup's own choice has up to 1 GiB, and some passes.
const (
	mostMemory     = 1 << 20  // KiB
	mostWork       = 64 << 20 // KiB, over all passes
	mostIterations = 64 << 20 // of a key that is stretched by PBKDF2
)

// opens is the kind of the key slots that a passphrase opens.
const opens = "luks2"

// sound returns errdefs.ErrPrecondition for a header that must not be given to cryptsetup, which would follow whatever it says: one with a key slot whose
// cipher is not that of Format (without a cipher every key opens it, and gives a key that was chosen by whoever made the slot), or that takes more memory or
// time than cryptsetup would choose; and one of which cryptsetup could read something else than this package.
func (m metadata) sound(device string) error {
	if m.odd != "" {
		return fmt.Errorf("%w: the LUKS2 header of %s %s; nothing was tried: "+notOurs, errdefs.ErrPrecondition, device, m.odd)
	}
	for _, s := range m.both { // cryptsetup may not take the copy that this package takes for whole
		if s.kind == opens && s.cipher != cipherName {
			return fmt.Errorf("%w: key slot %s of the LUKS2 header of %s has the cipher %q, not %s; nothing was tried: "+notOurs, errdefs.ErrPrecondition, s.name, device, s.cipher, cipherName)
		}
		if s.memory > mostMemory || s.memory > 0 && s.passes > mostWork/s.memory || s.iterations > mostIterations {
			return fmt.Errorf("%w: key slot %s of the LUKS2 header of %s takes %d KiB of memory and %d passes over it to be tried, or %d iterations, more than the driver lets it have (%d KiB, %d KiB in all passes, %d iterations); nothing was tried: "+
				"restore the header (cryptsetup luksHeaderRestore), or take that key away", errdefs.ErrPrecondition, s.name, device, s.memory, s.passes, s.iterations, mostMemory, mostWork, mostIterations)
		}
	}
	return nil
}

// usable returns the header of a device, if it is whole and sound.
func usable(device string) (metadata, error) {
	header, err := find(device)
	if err == nil {
		err = cmp.Or(header.sound(device), header.check(device))
	}
	return header, err
}

// UUID returns the UUID of the LUKS2 header of a device or a file, by the copy that cryptsetup takes (find); empty if there is no header.
func UUID(path string) (string, error) {
	header, err := find(path)
	return header.uuid, err
}

// Check returns errdefs.ErrDataLoss if neither copy of a header is whole: then no key opens it any more. It does not look at the key slots.
func Check(path string) error {
	header, err := find(path)
	if err != nil {
		return err
	}
	return header.check(path)
}

func (m metadata) check(path string) error {
	switch {
	case m.uuid == "":
		return fmt.Errorf("%w: %s has no LUKS2 header now", errdefs.ErrDataLoss, path)
	case !m.whole:
		return fmt.Errorf("%w: the LUKS2 header of %s is damaged in both of its copies", errdefs.ErrDataLoss, path)
	}
	return nil
}

// find returns the copy of a header that cryptsetup takes: the newer one of those that are whole. If none is, it returns any copy that is there. It is odd
// if either copy is. It reads the disk, as the page cache of a device in use may be out of date.
func find(path string) (found metadata, err error) {
	f, err := os.Open(path)
	if err != nil {
		return found, fmt.Errorf("read the LUKS2 header: %w", errdefs.FromErrno(err))
	}
	defer f.Close()
	_ = unix.Fadvise(int(f.Fd()), 0, 2*metadataSize, unix.FADV_DONTNEED)
	odd, both := "", []slot(nil)
	for _, at := range []int64{0, metadataSize} {
		header := make([]byte, metadataSize)
		if _, failure := f.ReadAt(header, at); failure != nil && !errors.Is(failure, io.EOF) {
			err = fmt.Errorf("read the LUKS2 header of %s: %w", path, errdefs.FromErrno(failure)) // no error if the other copy is whole
		}
		if !bytes.HasPrefix(header, magics[at]) {
			continue
		}
		one := parse(header)
		odd, both = cmp.Or(odd, one.odd), append(both, one.slots...)
		if found.uuid == "" || one.whole && (!found.whole || one.sequence > found.sequence) {
			found = one
		}
	}
	found.odd, found.both = odd, both
	if found.whole {
		return found, nil
	}
	return found, err
}

// parse reads one copy of the metadata. cryptsetup takes copies of other sizes and with other checksums, too, so such a one is odd.
func parse(header []byte) metadata {
	m := metadata{uuid: cString(header[uuidAt : uuidAt+uuidSize]), sequence: binary.BigEndian.Uint64(header[sequenceAt:])}
	stored := bytes.Clone(header[sumAt : sumAt+sumSize])
	clear(header[sumAt : sumAt+sumSize])
	sum := sha256.Sum256(header)
	size, algorithm := binary.BigEndian.Uint64(header[sizeAt:]), cString(header[algorithmAt:algorithmAt+algorithmSize])
	if size != metadataSize || algorithm != algorithmName {
		m.odd = fmt.Sprintf("has a copy of %d bytes with the checksum %q, not of %d with %s", size, algorithm, metadataSize, algorithmName)
		return m
	}
	if !bytes.HasPrefix(stored, sum[:]) {
		return m
	}
	var err error
	if m.slots, err = slotsOf([]byte(cString(header[textAt:]))); err != nil {
		m.odd = fmt.Sprintf("has a copy with the right checksum that is not understood (%v)", err)
		return m
	}
	m.whole = true
	return m
}

func cString(b []byte) string {
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}

// object is an object in the text of a header. Its names are read as cryptsetup does: those that differ in capitals are others, unlike for a struct.
type object map[string]json.RawMessage

// get decodes what has a name; nothing if nothing has it.
func (o object) get(name string, into any) error {
	text, is := o[name]
	if !is {
		return nil
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// slotsOf returns the key slots in the text of a header.
func slotsOf(text []byte) (found []slot, err error) {
	var all object
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	var slots map[string]object
	if err := all.get("keyslots", &slots); err != nil {
		return nil, err
	}
	for name, s := range slots {
		one := slot{name: name}
		var area, stretch object
		err := errors.Join(s.get("type", &one.kind), s.get("area", &area), s.get("kdf", &stretch))
		err = errors.Join(err, area.get("encryption", &one.cipher), stretch.get("memory", &one.memory), stretch.get("time", &one.passes), stretch.get("iterations", &one.iterations))
		if err != nil {
			return nil, fmt.Errorf("key slot %s: %w", name, err)
		}
		found = append(found, one)
	}
	return found, nil
}

// Erase overwrites all that Format wrote, on a device or in a file, with zeros, durably: no key opens the data any more. It may be called again.
func Erase(ctx context.Context, path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("erase the LUKS2 header: %w", errdefs.FromErrno(err))
	}
	zeros := make([]byte, 1<<20)
	for at := int64(0); at < Written && err == nil; at += int64(len(zeros)) {
		if err = ctx.Err(); err == nil {
			_, err = f.WriteAt(zeros, at)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("erase the LUKS2 header of %s: %w", path, errdefs.FromErrno(err))
	}
	return nil
}

// nodes is the folder in which libdevmapper makes a node for each device of cryptsetup. Nothing uses these nodes: the kernel makes /dev/dm-N.
const nodes = "/dev/mapper"

// nodesBelow makes the nodes of the devices below a device of the device mapper, where there is no udev: cryptsetup finds those devices only by them.
// forget, which is never nil, removes those that were made; after a crash ForgetNode does.
func nodesBelow(name string) (forget func() error, err error) {
	var made []string
	forget = func() (err error) {
		for _, name := range made {
			err = errors.Join(err, ForgetNode(name))
		}
		return err
	}
	below, err := dm.Below(name)
	for _, number := range below {
		text, failure := os.ReadFile(dm.Sysfs(number) + "/dm/name")
		if errors.Is(failure, os.ErrNotExist) { // no device of the device mapper
			continue
		}
		under := strings.TrimSpace(string(text))
		if failure == nil {
			failure = unix.Mknod(filepath.Join(nodes, under), unix.S_IFBLK|0o600, int(number))
		}
		if failure == nil {
			made = append(made, under)
		} else if !errors.Is(failure, unix.EEXIST) {
			err = errors.Join(err, fmt.Errorf("node of the device below: %w", errdefs.FromErrno(failure)))
		}
	}
	return forget, err
}

// ForgetNode removes the node that libdevmapper has made for a device. It would outlive the device, as the kernel removes that without telling
// libdevmapper. A link is udev's, which removes it itself.
func ForgetNode(name string) error {
	path := filepath.Join(nodes, name)
	info, err := os.Lstat(path)
	if err == nil && info.Mode()&os.ModeDevice != 0 {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the node of device %s: %w", name, errdefs.FromErrno(err))
	}
	return nil
}

// Nodes returns the names in /dev/mapper; some may have no device any more.
func Nodes() ([]string, error) {
	entries, err := os.ReadDir(nodes)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, errdefs.FromErrno(err)
}

// slots bounds how many keys are stretched at once, and with it the memory: 64 MiB each. A call gives its slot back after slotTime, which is many times
// what that takes: by then it waits for a disk, and must not hold up others.
var slots = make(chan struct{}, 2)

const slotTime = 5 * time.Second

// withKey runs cryptsetup with a key, which is all of its standard input: so not even the length of the key is on a command line, or in an error that
// shows one. errdefs.ErrInvalid and ErrNoKey without a key.
func withKey(ctx context.Context, key Key, argv ...string) error {
	if len(key) == 0 {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalid, ErrNoKey)
	}
	if err := protect(); err != nil {
		return err
	}
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	release := sync.OnceFunc(func() { <-slots })
	defer release()
	defer time.AfterFunc(slotTime, release).Stop()
	_, _, err := run(ctx, key, append([]string{argv[0], "--key-file=-"}, argv[1:]...)...)
	return err
}

// Exit statuses of cryptsetup(8).
const (
	wrongKey = 2
	noMemory = 3
)

// run runs cryptsetup, which asks nothing and does not wait for udev, as a container has none. errdefs.ErrUnsupported if it is not installed; ErrKey for a
// wrong key; errdefs.ErrUnavailable if it has too little memory.
func run(ctx context.Context, key Key, argv ...string) (stdout, stderr string, err error) {
	stdout, stderr, err = command.RunWith(ctx, command.Options{Input: key, Env: []string{"DM_DISABLE_UDEV=1"}}, append([]string{"cryptsetup", "--batch-mode"}, argv...)...)
	var failure *command.Error
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, os.ErrNotExist): // it would look like that of a device
		err = errdefs.Recast(errdefs.ErrUnsupported, err, "install cryptsetup")
	case !errors.As(err, &failure):
	case failure.Code == wrongKey && len(key) > 0:
		err = fmt.Errorf("%w: %w (%s)", errdefs.ErrPrecondition, ErrKey, strings.TrimSpace(stderr))
	case failure.Code == noMemory:
		err = fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	return stdout, stderr, err
}

// protect keeps this process, and all that it starts, from leaving a core dump, which may have keys in it, and others than root from looking into it. A
// limit of one byte is less than any dump has; unlike a limit of zero, it also counts for a program that takes dumps (core(5)).
var protect = sync.OnceValue(func() error {
	err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1})
	if err == nil {
		err = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	}
	if err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	return nil
})
