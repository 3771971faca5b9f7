package mirror

import (
	"context"
	"errors"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// tail is the size of the part that a mirror has behind the volume's bytes while none of its legs takes flushes. What is over the mirror ends before it.
const tail = 4096

// flushed calls bring with a table of line, so that the device takes flushes; below are the devices that line is over. The kernel passes flushes on to a
// device only if one below it takes them. It decides that for each device when its table takes effect, and what is over a mirror keeps what it was told
// when it was made. A leg that joins later may have a volatile cache, even if no present leg has one. So then the table has a part in memory, which takes
// flushes.
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

// failing calls bring with a table by which all I/O fails. A device over nothing takes no flushes: the kernel would acknowledge them at once, and a user
// would take for durable what the legs may have lost. So if the kernel has the module dm-flakey, the table has a part at its end that takes flushes and
// fails them.
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
