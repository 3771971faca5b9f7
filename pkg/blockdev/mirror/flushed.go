package mirror

import (
	"context"
	"errors"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// tail is what a mirror has behind the volume's bytes while none of its legs is flushed. What is over it is not as large.
const tail = 4096

// flushed calls bring with a table of line, which is over the devices below, that makes a device which takes flushes. The kernel passes flushes on to a
// device only if one below it takes them, and decides that when the table takes effect, for each device by itself: what is over a mirror keeps what it was
// told when it was made. So a mirror takes flushes also if its legs have no volatile cache, as one that joins later may: its table then has a part in memory,
// which takes them.
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

// failing calls bring with a table by which all I/O fails. A device over nothing takes no flushes, so the kernel would acknowledge them at once, and a user
// would take for durable what the legs may have lost. So the table has a part at its end that takes flushes and fails them, if the kernel has the module
// dm-flakey.
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
