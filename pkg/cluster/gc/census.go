package gc

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// census is what Kubernetes has of the volumes of a driver: read when it is first asked for,
// in pages, and then kept. It is for one decision, or for some at one time.
type census struct {
	live   client.Client
	driver string

	handles     map[string][]string // names of PersistentVolumes by handle
	attachments map[attachment]bool
}

// census returns one that has read nothing yet.
func (c *Collector) census() *census { return &census{live: c.kube.Live, driver: c.options.Driver} }

// attachment says of a PersistentVolume, by its name, or of an inline one, by its handle, which
// node a VolumeAttachment is for.
type attachment struct{ node, volume, handle string }

// volumes returns the names of the PersistentVolumes by their handles.
func (c *census) volumes(ctx context.Context) (map[string][]string, error) {
	if c.handles != nil {
		return c.handles, nil
	}
	handles := map[string][]string{}
	err := kube.EachPage(ctx, c.live, &corev1.PersistentVolumeList{}, func(list *corev1.PersistentVolumeList) {
		for i := range list.Items {
			if source := list.Items[i].Spec.CSI; source != nil && source.Driver == c.driver {
				handles[source.VolumeHandle] = append(handles[source.VolumeHandle], list.Items[i].Name)
			}
		}
	})
	if err == nil {
		c.handles = handles
	}
	return handles, err
}

// attached reports whether a VolumeAttachment asks on a node for a volume with an ID, which is known by names, too.
func (c *census) attached(ctx context.Context, id, node string, names ...string) (bool, error) {
	handles, err := c.volumes(ctx)
	if err != nil {
		return false, err
	}
	attachments, err := c.allAttachments(ctx)
	if err != nil {
		return false, err
	}
	// That of a PersistentVolume that is gone counts too.
	for _, name := range append(names, handles[id]...) {
		if attachments[attachment{node: node, volume: name}] {
			return true, nil
		}
	}
	return attachments[attachment{node: node, handle: id}], nil
}

// allAttachments returns what all VolumeAttachments ask for.
func (c *census) allAttachments(ctx context.Context) (map[attachment]bool, error) {
	if c.attachments != nil {
		return c.attachments, nil
	}
	attachments := map[attachment]bool{}
	err := kube.EachPage(ctx, c.live, &storagev1.VolumeAttachmentList{}, func(list *storagev1.VolumeAttachmentList) {
		for i := range list.Items {
			one := &list.Items[i].Spec
			if one.Attacher != c.driver {
				continue
			}
			if name := one.Source.PersistentVolumeName; name != nil {
				attachments[attachment{node: one.NodeName, volume: *name}] = true
			}
			if inline := one.Source.InlineVolumeSpec; inline != nil && inline.CSI != nil {
				attachments[attachment{node: one.NodeName, handle: inline.CSI.VolumeHandle}] = true
			}
		}
	})
	if err == nil {
		c.attachments = attachments
	}
	return attachments, err
}
