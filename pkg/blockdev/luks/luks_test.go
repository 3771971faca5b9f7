package luks_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	mib   = 1 << 20
	uuid  = "00112233-4455-6677-8899-aabbccddeeff"
	other = "ffeeddcc-bbaa-9988-7766-554433221100"
)

// key has bytes that a terminal would end at, or change: a zero, and a line end.
var key = luks.Key("a \x00 key\n")

// image returns a file with room for a header and some data.
func image(t *testing.T) string {
	t.Helper()
	drivertest.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "image")
	check.OK(t, os.WriteFile(path, nil, 0o600))
	check.OK(t, os.Truncate(path, luks.HeaderSize+mib))
	return path
}

// opens reports whether a key opens the header of a file, by cryptsetup itself.
func opens(t *testing.T, path string, key luks.Key) bool {
	t.Helper()
	cmd := exec.Command("cryptsetup", "luksDump", "--dump-volume-key", "--batch-mode", "--key-file=-", path)
	cmd.Stdin = bytes.NewReader(key)
	out, err := cmd.CombinedOutput()
	if err != nil && !strings.Contains(string(out), "No key available") && !strings.Contains(string(out), "not a valid LUKS") {
		t.Fatalf("%v: %s", err, out)
	}
	return err == nil
}

func TestFormat(t *testing.T) {
	path := image(t)
	if have, err := luks.UUID(path); have != "" || err != nil {
		t.Errorf("of zeros the UUID is %q, %v", have, err)
	}
	check.OK(t, luks.Format(t.Context(), path, uuid, key))
	if have, err := luks.UUID(path); have != uuid || err != nil {
		t.Errorf("the UUID is %q, %v; want %s", have, err, uuid)
	}
	if !opens(t, path, key) || opens(t, path, key[:len(key)-1]) || opens(t, path, luks.Key("wrong")) {
		t.Error("other keys open it than the one that it was made with")
	}
	said, err := exec.Command("cryptsetup", "luksDump", path).Output()
	check.OK(t, err)
	dump := strings.Join(strings.Fields(string(said)), " ")
	for _, want := range []string{"offset: 16777216 [bytes]", "cipher: aes-xts-plain64", "sector: 4096 [bytes]", "PBKDF: argon2id Time cost: 4 Memory: 65536", "Key: 512 bits"} {
		if !strings.Contains(dump, want) {
			t.Errorf("the header does not say %q: %s", want, said)
		}
	}
	// Again, over what is there.
	check.OK(t, luks.Format(t.Context(), path, other, luks.Key("another")))
	if have, _ := luks.UUID(path); have != other || opens(t, path, key) {
		t.Errorf("made anew it has the UUID %q; the first key opens it: %v", have, opens(t, path, key))
	}
}

func TestSetUUID(t *testing.T) {
	path := image(t)
	check.OK(t, luks.Format(t.Context(), path, uuid, key))
	for range 2 {
		check.OK(t, luks.SetUUID(t.Context(), path, other))
		if have, err := luks.UUID(path); have != other || err != nil || !opens(t, path, key) {
			t.Errorf("the UUID is %q, %v; the key opens it: %v", have, err, opens(t, path, key))
		}
	}
	// The first copy is torn: the driver takes the second one, as cryptsetup does.
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt(make([]byte, 4096), 0)
	check.OK(t, errors.Join(err, f.Close()))
	if have, err := luks.UUID(path); have != other || err != nil || !opens(t, path, key) {
		t.Errorf("of the second copy the UUID is %q, %v; the key opens it: %v", have, err, opens(t, path, key))
	}
}

// TestDamagedHeader: if one copy of a header is damaged, wherever, the other one is taken, as by cryptsetup. If both are, it is an error.
func TestDamagedHeader(t *testing.T) {
	for _, at := range []int64{0, 168, 4096 + 300} { // in the magic, the UUID, and the text
		for _, first := range []int64{0, 16 << 10} {
			path := image(t)
			check.OK(t, luks.Format(t.Context(), path, uuid, key))
			flip(t, path, first+at)
			have, err := luks.UUID(path)
			if err = errors.Join(err, luks.Check(path)); have != uuid || err != nil {
				t.Errorf("damaged at %d the UUID is %q, %v", first+at, have, err)
			}
			if !opens(t, path, key) { // cryptsetup makes the copy whole again
				t.Fatalf("damaged at %d the key does not open it", first+at)
			}
			flip(t, path, at)
			flip(t, path, 16<<10+at)
			if err := luks.Check(path); !errors.Is(err, errdefs.ErrDataLoss) || opens(t, path, key) {
				t.Errorf("damaged at %d in both copies: %v; the key opens it: %v", at, err, opens(t, path, key))
			}
		}
	}
}

// flip flips a bit of a file.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	check.OK(t, err)
	one := make([]byte, 1)
	_, err = f.ReadAt(one, at)
	one[0] ^= 1
	_, failure := f.WriteAt(one, at)
	check.OK(t, errors.Join(err, failure, f.Close()))
}

// TestErase: nothing of a header and its key slots is left. The data behind stays.
func TestErase(t *testing.T) {
	path := image(t)
	check.OK(t, luks.Format(t.Context(), path, uuid, key))
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte("data"), luks.HeaderSize)
	check.OK(t, errors.Join(err, f.Close()))
	for range 2 {
		check.OK(t, luks.Erase(t.Context(), path))
		left, err := os.ReadFile(path)
		check.OK(t, err)
		if rest := bytes.TrimLeft(left, "\x00"); len(left)-len(rest) != luks.HeaderSize || string(rest[:4]) != "data" {
			t.Errorf("the first byte that is not zero is at %d", len(left)-len(rest))
		}
	}
	if have, err := luks.UUID(path); have != "" || err != nil || opens(t, path, key) {
		t.Errorf("the UUID is %q, %v", have, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := luks.Erase(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("erased for nobody: %v", err)
	}
}

// TestKeyIsNotTold: no error, and nothing that prints or encodes a key, shows it. A missing key is said to be missing.
func TestKeyIsNotTold(t *testing.T) {
	const secret = "do-not-tell"
	key := luks.Key(secret)
	said := fmt.Sprintf("%v %s %q %x %+v %#v %d", key, key, key, key, struct{ K luks.Key }{key}, key, key)
	encoded, err := json.Marshal(map[string]any{"key": key})
	check.OK(t, err)
	said += string(encoded)
	for _, err := range []error{
		luks.Format(t.Context(), "/nowhere/device", uuid, key),
		luks.Open(t.Context(), "/nowhere/device", "ashlar-test", key, false),
		luks.Resize(t.Context(), "/nowhere/device", "ashlar-test", key),
	} {
		if err == nil {
			t.Error("done where there is nothing")
		}
		said += fmt.Sprintf("%v %+v %#v", err, err, err)
	}
	for _, form := range []string{secret, fmt.Sprintf("%x", secret), fmt.Sprint([]byte(secret)), fmt.Sprintf("%#v", []byte(secret))} {
		if strings.Contains(said, strings.Trim(form, "[]")) {
			t.Errorf("%q is told: %s", form, said)
		}
	}
	if length := fmt.Sprintf(" %d ", len(secret)); strings.Contains(said, length) {
		t.Errorf("its length is told: %s", said)
	}
	if err := luks.Format(t.Context(), image(t), uuid, nil); !errors.Is(err, luks.ErrNoKey) || !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("without a key: %v", err)
	}
}

// TestNoCoreDump: a process that had a key leaves no core dump, nor do the programs that it starts.
func TestNoCoreDump(t *testing.T) {
	check.OK(t, luks.Format(t.Context(), image(t), uuid, key))
	limits, err := os.ReadFile("/proc/self/limits")
	check.OK(t, err)
	child, err := exec.Command("cat", "/proc/self/limits").Output()
	check.OK(t, err)
	for _, text := range []string{string(limits), string(child)} {
		at := strings.Index(text, "Max core file size")
		if line, _, _ := strings.Cut(text[at:], "\n"); strings.Join(strings.Fields(line), " ") != "Max core file size 1 1 bytes" {
			t.Errorf("%q", line)
		}
	}
}
