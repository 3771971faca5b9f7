package blockdev_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume is made, copied, grown and deleted. Each call may come twice.
func ExamplePool() {
	ctx := context.Background()
	var pool blockdev.Pool = memory.NewDisk(1<<30).Open("fast", nil)
	defer pool.Close()

	volume := blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}, Name: "pvc-1", Size: 64 << 20}
	for range 2 {
		record, err := pool.Create(ctx, volume)
		fmt.Println(record.Name, record.Size, record.Ready, err)
	}

	snapshot := blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Snapshot, Key: strings.Repeat("b", 32)}, Name: "snapshot-1", Size: 64 << 20, Origin: volume.Ref}
	record, err := pool.Create(ctx, snapshot)
	fmt.Println(record.Name, record.Origin == volume.Ref, err)

	record, err = pool.Expand(ctx, volume.Ref, 128<<20)
	fmt.Println(record.Name, record.Size, err)

	capacity, err := pool.Capacity(ctx)
	fmt.Println("promised", capacity.Promised>>20, "MiB of", capacity.Total>>20, err)

	for range 2 {
		fmt.Println(pool.Delete(ctx, volume.Ref))
	}
	_, err = pool.Get(ctx, volume.Ref)
	fmt.Println(errors.Is(err, errdefs.ErrNotFound))
	// Output:
	// pvc-1 67108864 true <nil>
	// pvc-1 67108864 true <nil>
	// snapshot-1 true <nil>
	// pvc-1 134217728 <nil>
	// promised 192 MiB of 1024 <nil>
	// <nil>
	// <nil>
	// true
}

// Labels belong to the layer above the pool. A change is made as a whole, or, if it returns an error, not at all.
func ExamplePool_setLabels() {
	ctx := context.Background()
	pool := memory.NewDisk(1<<30).Open("fast", nil)
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}
	if _, err := pool.Create(ctx, blockdev.Spec{Ref: ref, Name: "pvc-1", Size: 64 << 20}); err != nil {
		fmt.Println(err)
	}
	claim := func(node string) func(labels map[string]string) error {
		return func(labels map[string]string) error {
			if have := labels["node"]; have != "" && have != node {
				return fmt.Errorf("%w: %s has it", errdefs.ErrPrecondition, have)
			}
			labels["node"] = node
			return nil
		}
	}
	record, err := pool.SetLabels(ctx, ref, claim("node-1"))
	fmt.Println(record.Labels, err)
	_, err = pool.SetLabels(ctx, ref, claim("node-2"))
	fmt.Println(errors.Is(err, errdefs.ErrPrecondition))
	// Output:
	// map[node:node-1] <nil>
	// true
}

// Prepare is given the bytes of a new volume before anybody else can have them. If it fails, there is no volume.
func ExampleSpec_prepare() {
	ctx := context.Background()
	pool := memory.NewDisk(1<<30).Open("fast", nil)
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}
	_, err := pool.Create(ctx, blockdev.Spec{Ref: ref, Name: "pvc-1", Size: 64 << 20, Prepare: func(_ context.Context, path string) error {
		bytes, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = bytes.WriteString("made for pvc-1")
		return errors.Join(err, bytes.Close())
	}})
	fmt.Println(err)
	// Output: <nil>
}

// As returns what some pools can do beyond the contract, also behind a pool that stands for another.
func ExampleAs() {
	ctx := context.Background()
	var pool blockdev.Pool = memory.NewDisk(1<<30).Open("fast", nil)
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat("a", 32)}
	if _, err := pool.Create(ctx, blockdev.Spec{Ref: ref, Name: "pvc-1", Size: 64 << 20}); err != nil {
		fmt.Println(err)
	}
	if differ, can := blockdev.As[blockdev.Differ](pool); can {
		err := differ.Allocated(ctx, ref, 0, func(e blockdev.Extent) error {
			fmt.Println("data at", e.Offset)
			return nil
		})
		fmt.Println("nothing was written:", err)
	}
	_, can := blockdev.As[blockdev.Cutter](pool)
	fmt.Println("it copies in an instant:", can)
	// Output:
	// nothing was written: <nil>
	// it copies in an instant: false
}
