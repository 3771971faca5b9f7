package luks_test

import (
	"bytes"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	copySize = 16 << 10 // of a copy of the header's metadata
	sumAt    = 448
	sumSize  = 64
	textAt   = 4096
)

// crafted is what somebody writes over a header who can write to the disk.
type crafted struct {
	*testing.T
	image []byte
}

// text returns the text of a copy of the header, and rest the object in it that has a path.
func (c crafted) text(n int, path ...string) (text, rest map[string]any) {
	c.Helper()
	check.OK(c, json.Unmarshal(bytes.TrimRight(c.image[n*copySize:][textAt:copySize], "\x00"), &text))
	rest = text
	for _, name := range path {
		rest = rest[name].(map[string]any)
	}
	return text, rest
}

// put makes a text that of a copy of the header, with the right checksum.
func (c crafted) put(n int, text any) {
	c.Helper()
	made, is := text.([]byte)
	if !is {
		var err error
		made, err = json.Marshal(text)
		check.OK(c, err)
	}
	area := c.image[n*copySize:][textAt:copySize]
	clear(area)
	copy(area, made)
	c.sum(n)
}

// sum gives a copy of the header the right checksum.
func (c crafted) sum(n int) {
	one := c.image[n*copySize:][:copySize]
	clear(one[sumAt:][:sumSize])
	sum := sha256.Sum256(one)
	copy(one[sumAt:], sum[:])
}

// known gives the first key slot of a copy of the header no cipher, and a key of the volume that whoever did it knows: so any passphrase opens it.
func (c crafted) known(n int) map[string]any {
	c.Helper()
	text, slot := c.text(n, "keyslots", "0")
	_, digest := c.text(n, "digests", "0")
	key := bytes.Repeat([]byte{7}, 64)
	digest["digest"] = c.digest(digest, key)
	text["digests"].(map[string]any)["0"] = digest
	area := slot["area"].(map[string]any)
	area["encryption"] = "cipher_null-ecb"
	text["keyslots"].(map[string]any)["0"] = slot
	at, err := strconv.Atoi(area["offset"].(string))
	check.OK(c, err)
	split(c.image[at:][:4000*len(key)], key)
	return text
}

// digest returns by what cryptsetup recognises a key.
func (c crafted) digest(how map[string]any, key []byte) string {
	c.Helper()
	salt, err := base64.StdEncoding.DecodeString(how["salt"].(string))
	check.OK(c, err)
	made, err := pbkdf2.Key(sha256.New, string(key), salt, int(how["iterations"].(float64)), sha256.Size)
	check.OK(c, err)
	return base64.StdEncoding.EncodeToString(made)
}

// split fills stripes with a key, as a key slot has it: the last stripe gives the key only with all others (LUKS1 On-Disk Format Specification, AFsplit).
func split(stripes, key []byte) {
	_, _ = rand.Read(stripes)
	mixed := make([]byte, len(key))
	for at := 0; ; at += len(key) {
		stripe := stripes[at:][:len(key)]
		last := at+len(key) == len(stripes)
		if last {
			copy(stripe, key)
		}
		for i := range mixed {
			mixed[i] ^= stripe[i]
		}
		if last {
			copy(stripe, mixed)
			return
		}
		for i := 0; i < len(mixed); i += sha256.Size {
			part := binary.BigEndian.AppendUint32(nil, uint32(i/sha256.Size))
			sum := sha256.Sum256(append(part, mixed[i:i+sha256.Size]...))
			copy(mixed[i:], sum[:])
		}
	}
}

// TestCraftedKeySlot: somebody who can write to the disk makes a key slot that any passphrase opens, with a key of the volume that they know: all that is
// written from then on they could read. Nor does such a header, or one that takes all memory, get to cryptsetup behind something that the driver reads
// otherwise than cryptsetup.
func TestCraftedKeySlot(t *testing.T) {
	const memory = 4 << 20
	both := func(c crafted, do func(n int)) {
		for n := range 2 {
			do(n)
		}
	}
	greedy := func(c crafted, n int) map[string]any {
		text, stretch := c.text(n, "keyslots", "0", "kdf")
		stretch["memory"] = memory
		slot := text["keyslots"].(map[string]any)["0"].(map[string]any)
		slot["kdf"] = stretch
		return text
	}
	for what, craft := range map[string]func(c crafted){
		"a known key": func(c crafted) { both(c, func(n int) { c.put(n, c.known(n)) }) },
		"a name in other letters": func(c crafted) {
			both(c, func(n int) {
				good, _ := c.text(n)
				text := greedy(c, n)
				text["keyslot\u017f"] = good["keyslots"] // the long s, which is a small s to encoding/json, and comes later
				c.put(n, text)
			})
		},
		"negative memory": func(c crafted) {
			both(c, func(n int) {
				text := greedy(c, n)
				text["keyslots"].(map[string]any)["0"].(map[string]any)["kdf"].(map[string]any)["memory"] = -1
				c.put(n, text)
			})
		},
		"many iterations": func(c crafted) {
			both(c, func(n int) {
				text := greedy(c, n)
				slot := text["keyslots"].(map[string]any)["0"].(map[string]any)
				slot["kdf"] = map[string]any{"type": "pbkdf2", "hash": "sha256", "iterations": 1 << 31, "salt": slot["kdf"].(map[string]any)["salt"]}
				c.put(n, text)
			})
		},
		"a comment": func(c crafted) { // cryptsetup's parser takes it
			both(c, func(n int) {
				made, err := json.Marshal(greedy(c, n))
				check.OK(c, err)
				c.put(n, slices.Concat([]byte("/**/"), made))
			})
		},
		"another checksum": func(c crafted) {
			c.put(1, greedy(c, 1))
			one := c.image[copySize:][:copySize]
			one[23]++ // it is the newer one
			clear(one[72:][:32])
			copy(one[72:], "sha512")
			clear(one[sumAt:][:sumSize])
			sum := sha512.Sum512(one)
			copy(one[sumAt:], sum[:])
		},
		"another size": func(c crafted) { // the good copy is within it
			c.put(0, greedy(c, 0))
			one := c.image[:2*copySize]
			binary.BigEndian.PutUint64(one[8:], uint64(len(one)))
			clear(one[sumAt:][:sumSize])
			sum := sha256.Sum256(one)
			copy(one[sumAt:], sum[:])
		},
		"a newer copy that cryptsetup does not take": func(c crafted) {
			c.put(1, greedy(c, 1))
			text, _ := c.text(0)
			delete(text, "config")
			c.image[23]++
			c.put(0, text)
		},
	} {
		t.Run(what, func(t *testing.T) {
			path := image(t)
			check.OK(t, luks.Format(t.Context(), path, uuid, key))
			all, err := os.ReadFile(path)
			check.OK(t, err)
			c := crafted{t, all}
			craft(c)
			check.OK(t, os.WriteFile(path, c.image, 0o600))
			for _, key := range []luks.Key{key, luks.Key("another")} {
				if is, err := luks.Opens(t.Context(), path, key); is || !errors.Is(err, errdefs.ErrPrecondition) || errors.Is(err, luks.ErrKey) || !strings.Contains(err.Error(), "nothing was tried") {
					t.Errorf("opened: %v, %v", is, err)
				}
			}
		})
	}
}
