package era

import (
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// TestParse: lines that the tool prints, and lines that it might print.
func TestParse(t *testing.T) {
	const mib = 1 << 20
	for line, want := range map[string]dm.Range{
		`  <block block="20"/>`:               {Offset: 20 * mib, Length: mib},
		`  <range begin="5" end = "15"/>`:     {Offset: 5 * mib, Length: 10 * mib},
		`  <range begin="60" end = "65"/>`:    {Offset: 60 * mib, Length: 4*mib + 512},
		`<blocks>`:                            {},
		`</blocks>`:                           {},
		``:                                    {},
		`  <range begin="60" end = "66"/>`:    {Offset: -1},
		`  <range begin="15" end = "15"/>`:    {Offset: -1},
		`  <block block="-1"/>`:               {Offset: -1},
		`  <block block=""/>`:                 {Offset: -1},
		`<superblock uuid="" block_size=""/>`: {Offset: -1},
	} {
		got, marked, err := parse([]byte(line), mib, 64*mib+512)
		if want.Offset < 0 {
			if err == nil {
				t.Errorf("%q is %v", line, got)
			}
			continue
		}
		if err != nil || got != want || marked != (want.Length > 0) {
			t.Errorf("%q is %v, %v, %v, not %v", line, got, marked, err, want)
		}
	}
}

// TestRoom: a device has at most as many blocks as its metadata have room for.
func TestRoom(t *testing.T) {
	const tib = 1 << 40
	for size, want := range map[int64]int64{1 << 20: 1 << 20, tib: 1 << 20, tib + 1<<20: 2 << 20, 2 * tib: 2 << 20, 64 * tib: 64 << 20} {
		if got := Block(size); got != want {
			t.Errorf("%d bytes have blocks of %d, not %d", size, got, want)
		}
		if room := Room(size, Block(size)); room < size/Block(size)*8 || room%4096 != 0 {
			t.Errorf("%d bytes have room of %d", size, room)
		}
	}
}
