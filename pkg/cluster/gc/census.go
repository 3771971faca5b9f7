package gc

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// census is which PersistentVolumes and VolumeAttachments Kubernetes has for a driver. Each of the two is listed when it is first asked for, and then kept:
// so a census is used for decisions of one moment only.
type census struct {
	live   client.Client
	driver string

	handles     map[string][]string // names of PersistentVolumes by handle
	attachments map[attachment]bool
}

// census returns a census that has read nothing yet.
func (c *Collector) census() *census { return &census{live: c.kube.Live, driver: c.options.Driver} }

// attachment is what a VolumeAttachment asks for: a node, and the name of a PersistentVolume or, for an inline volume, its handle.
type attachment struct{ node, volume, handle string }

// volumes returns the names of the driver's PersistentVolumes, by their handles.
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

// attached reports whether there is a VolumeAttachment of a volume for a node. names are those of PersistentVolumes that the volume may have or have had.
func (c *census) attached(ctx context.Context, id, node string, names ...string) (bool, error) {
	handles, err := c.volumes(ctx)
	if err != nil {
		return false, err
	}
	attachments, err := c.allAttachments(ctx)
	if err != nil {
		return false, err
	}
	// A VolumeAttachment counts also if its PersistentVolume is gone: so names are looked for beside handles.
	for _, name := range append(names, handles[id]...) {
		if attachments[attachment{node: node, volume: name}] {
			return true, nil
		}
	}
	return attachments[attachment{node: node, handle: id}], nil
}

// allAttachments returns what all VolumeAttachments of the driver ask for.
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
