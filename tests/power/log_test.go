package power

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
)

// The log of dm-log-writes, as in drivers/md/dm-log-writes.c: a superblock, then entries,
// each of which is one sector with a header, and the data after it. Writes are logged when
// the flush that covers them is done, and before it; those with FUA, and marks, when they are
// done.
const (
	logMagic   = 0x6a736677736872
	logVersion = 1
	sector     = 512 // of the devices of these tests

	logFlush   = 1 << 0
	logFUA     = 1 << 1
	logDiscard = 1 << 2
	logMark    = 1 << 3
)

// write is one write to the logged disk.
type write struct {
	offset, length int64 // bytes, on the disk
	data           int64 // offset in the log; -1: zeros (a discard)
	through        bool  // FUA: it is on the disk once it is done
	acked          int   // the last mark before it
}

// epoch is what happened between two flushes.
type epoch struct {
	writes []write
	acked  int // the last mark before the flush that ends it
}

// readLog returns the epochs of a log. Marks are ascending numbers.
func readLog(log io.ReaderAt) ([]epoch, error) {
	var super struct {
		Magic, Version, Entries uint64
		SectorSize              uint32
	}
	if err := decode(log, 0, &super); err != nil {
		return nil, err
	}
	if super.Magic != logMagic || super.Version != logVersion || super.SectorSize != sector {
		return nil, fmt.Errorf("the log begins with %+v", super)
	}
	var epochs []epoch
	var now epoch
	at := int64(sector)
	ended := false
	for range super.Entries {
		var entry struct{ Sector, Sectors, Flags, Length uint64 }
		if err := decode(log, at, &entry); err != nil {
			return nil, err
		}
		header := at
		at += sector
		w := write{offset: int64(entry.Sector) * sector, length: int64(entry.Sectors) * sector, data: at, through: entry.Flags&logFUA != 0, acked: now.acked}
		if entry.Flags&logMark != 0 {
			text := make([]byte, entry.Length)
			if _, err := log.ReadAt(text, header+int64(binary.Size(entry))); err != nil {
				return nil, err
			}
			n, err := strconv.Atoi(string(bytes.TrimSpace(text)))
			if ended = strings.HasPrefix(string(text), "dm-log-writes-end"); err != nil && !ended {
				return nil, fmt.Errorf("mark %q", text)
			} else if err == nil {
				now.acked = n
			}
			continue
		}
		if entry.Flags&logDiscard != 0 {
			w.data = -1
		} else {
			at += w.length
		}
		if entry.Flags&logFlush != 0 {
			epochs = append(epochs, now)
			now = epoch{acked: now.acked}
		}
		if w.length > 0 {
			now.writes = append(now.writes, w)
		}
	}
	if !ended {
		return nil, errors.New("the log has no end: it ran full")
	}
	return append(epochs, now), nil
}

func decode(from io.ReaderAt, at int64, to any) error {
	raw := make([]byte, binary.Size(to))
	if _, err := from.ReadAt(raw, at); err != nil {
		return fmt.Errorf("read the log at byte %d: %w", at, err)
	}
	return binary.Read(bytes.NewReader(raw), binary.LittleEndian, to)
}

// physical is what a disk writes whole or not at all, in bytes: the physical sector of today's.
// ext4 needs as much: torn within 4 KiB, its superblock has a wrong checksum.
const physical = 4096

// apply does the write again; keep, if set, says which of its physical sectors.
func (w write) apply(disk io.WriterAt, log io.ReaderAt, keep func() bool) error {
	data := make([]byte, w.length)
	if w.data >= 0 {
		if _, err := log.ReadAt(data, w.data); err != nil {
			return fmt.Errorf("read the log at byte %d: %w", w.data, err)
		}
	}
	if keep == nil {
		_, err := disk.WriteAt(data, w.offset)
		return err
	}
	for at, next := int64(0), int64(0); at < w.length; at = next {
		next = min(w.length, at+physical-(w.offset+at)%physical)
		if keep() {
			if _, err := disk.WriteAt(data[at:next], w.offset+at); err != nil {
				return err
			}
		}
	}
	return nil
}

// fate is what becomes of the writes of the last epoch that no flush covers.
type fate string

const (
	none   fate = "none of them"
	all    fate = "all of them"
	some   fate = "some of them" // any half
	torn   fate = "some of them, one torn"
	before fate = "none, and a FUA write torn or lost"
	lost   fate = "none, and flushes did nothing" // the disk is broken
)

// cut is a moment at which the power goes.
type cut struct {
	epoch   int
	fate    fate
	seed    uint64
	claimed int // steps that were done on a disk that lost some of them; 0: on one that did not
}

func (c cut) String() string { return fmt.Sprintf("epoch %d, %s, seed %d", c.epoch, c.fate, c.seed) }

// last applies to a disk, on which all epochs before the cut are, what is there of its own. It
// returns the last mark before the cut.
func (c cut) last(e epoch, disk io.WriterAt, log io.ReaderAt) (acked int, err error) {
	random := rand.New(rand.NewPCG(c.seed, 0))
	half := func() bool { return random.IntN(2) == 0 }
	var through, cached []int
	for i, w := range e.writes {
		if w.through {
			through = append(through, i)
		} else {
			cached = append(cached, i)
		}
	}
	broken, stop := -1, -1
	if c.fate == torn && len(cached) > 0 {
		broken = cached[random.IntN(len(cached))]
	}
	acked = e.acked
	if c.fate == before {
		stop = through[random.IntN(len(through))]
		acked = e.writes[stop].acked
	}
	for i, w := range e.writes {
		var keep func() bool
		switch {
		case i == stop:
			if half() {
				return acked, nil
			}
			return acked, w.apply(disk, log, half)
		case i == broken:
			keep = half
		case w.through || c.fate == all:
		case c.fate == none || c.fate == before || c.fate == lost || half():
			continue
		}
		if err := w.apply(disk, log, keep); err != nil {
			return 0, err
		}
	}
	return acked, nil
}

// cuts chooses n moments after the first mark: every second one is right after the OK of a
// call or the end of an fsync that was not followed by a flush, with nothing on the disk that
// was not flushed.
func cuts(epochs []epoch, n int, random *rand.Rand) []cut {
	var sharp, others []cut
	for i, e := range epochs {
		if i == 0 || e.acked == 0 {
			continue
		}
		if epochs[i-1].acked != e.acked {
			sharp = append(sharp, cut{epoch: i, fate: none, seed: random.Uint64()})
		}
		fates := []fate{all, some, torn}
		if len(e.writes) == 0 {
			fates = nil
		}
		for _, w := range e.writes {
			if w.through {
				fates = append(fates, before)
				break
			}
		}
		for _, f := range fates {
			others = append(others, cut{epoch: i, fate: f, seed: random.Uint64()})
		}
	}
	random.Shuffle(len(sharp), func(i, j int) { sharp[i], sharp[j] = sharp[j], sharp[i] })
	random.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	var chosen []cut
	for len(chosen) < n && len(sharp)+len(others) > 0 {
		for _, from := range []*[]cut{&sharp, &others} {
			if len(*from) > 0 && len(chosen) < n {
				chosen, *from = append(chosen, (*from)[0]), (*from)[1:]
			}
		}
	}
	return chosen
}

// rebuilt is a disk that is made anew from a log.
type rebuilt struct {
	disk, log *os.File
	epochs    []epoch
	done      int // epochs that are on the disk
}

// advance brings the disk to where the flush before an epoch left it.
func (r *rebuilt) advance(epoch int) error {
	for ; r.done < epoch; r.done++ {
		for _, w := range r.epochs[r.done].writes {
			if err := w.apply(r.disk, r.log, nil); err != nil {
				return err
			}
		}
	}
	return nil
}
