package volume_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// The store of one node, over a pool in memory. A call that is repeated returns what the first one made.
func ExampleStore() {
	mounts, err := mount.LoadTable()
	if err != nil {
		fmt.Println(err)
		return
	}
	pools := []blockdev.Pool{memory.NewDisk(1<<30).Open("default", nil)}
	var store volume.Store
	store, err = volume.NewLocal(context.Background(), "node-1", pools, mounts, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := aLife(context.Background(), store); err != nil {
		fmt.Println(err)
	}
	// Output:
	// data has 64 MiB, and is the same again: true
	// refused while it is claimed: true
	// the snapshot has 64 MiB
	// the copy has 128 MiB
}

// aLife makes, uses and deletes a volume, a snapshot of it, and a copy of that.
func aLife(ctx context.Context, store volume.Store) error {
	spec := volume.Spec{Name: "data", Size: volume.Range{Required: 64 << 20}, Filesystem: filesystem.Ext4}
	v, err := store.Create(ctx, spec)
	if err != nil {
		return err
	}
	again, err := store.Create(ctx, spec)
	if err != nil {
		return err
	}
	fmt.Printf("%s has %d MiB, and is the same again: %v\n", v.Name, v.Size>>20, again.ID == v.ID)

	if _, err := store.Claim(ctx, v.ID, volume.Claim{Node: "node-1"}); err != nil {
		return err
	}
	fmt.Println("refused while it is claimed:", errors.Is(store.Delete(ctx, v.ID), errdefs.ErrInUse))

	snapshot, err := store.CreateSnapshot(ctx, "before the upgrade", v.ID)
	if err != nil {
		return err
	}
	fmt.Printf("the snapshot has %d MiB\n", snapshot.Size>>20)
	restored, err := store.Create(ctx, volume.Spec{Name: "copy", Size: volume.Range{Required: 128 << 20}, Source: snapshot.ID, Filesystem: filesystem.Ext4})
	if err != nil {
		return err
	}
	fmt.Printf("the %s has %d MiB\n", restored.Name, restored.Size>>20)

	return errors.Join(store.Release(ctx, v.ID, "node-1"), store.Delete(ctx, v.ID), store.DeleteSnapshot(ctx, snapshot.ID), store.Delete(ctx, restored.ID))
}
