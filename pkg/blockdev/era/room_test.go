package era

import "testing"

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
