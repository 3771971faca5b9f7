package mirror

import (
	"context"
	"errors"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// tail is what a mirror has behind the volume's bytes while none of its legs is flushed. What is over it is not as large.
const tail = 4096

// flushed has a table of one line, over some devices, be brought to a device that is flushed. The kernel passes flushes on to a device if one below it takes them, and decides that when a table is brought into effect, for each device by itself: what is over
// a mirror keeps what it was told when it was made. So a mirror of legs without a cache that could be lost takes flushes all the same: one that joins later may need them. It has a part in memory for that.
func flushed(ctx context.Context, line dm.Line, below []uint64, bring func(table []dm.Line) error) error {
	if slices.ContainsFunc(below, dm.Flushed) {
		return bring([]dm.Line{line})
	}
	held, number, err := inMemory(ctx, make([]byte, tail))
	if err != nil {
		return err
	}
	err = bring([]dm.Line{line, {Start: line.Length, Length: tail, Kind: "linear", Text: dm.Number(number) + " 0"}})
	return errors.Join(err, held.Close()) // it goes with the table
}

// failing has a table be brought by which all fails. A device over nothing that takes flushes is not flushed, and the kernel acknowledges them at once: who has written something before, which the legs may have lost, would take it for durable. So there is a part behind it
// that takes flushes, and fails them, where the kernel has what it takes (the module dm-flakey).
func failing(ctx context.Context, size int64, bring func(table []dm.Line) error) error {
	table := []dm.Line{{Length: size, Kind: ended}}
	if dm.HasTarget(fails) != nil {
		return bring(table)
	}
	held, number, err := inMemory(ctx, make([]byte, tail))
	if err != nil {
		return err
	}
	err = bring(append(table, dm.Line{Start: size, Length: tail, Kind: fails, Text: dm.Number(number) + " 0 0 1"})) // always down
	return errors.Join(err, held.Close())
}
