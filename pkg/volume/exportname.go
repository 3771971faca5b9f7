package volume

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The export in the record of a volume, and what is derived from it: the names and secrets by which its consumer connects.

// export is the export in the record of a volume.
//
// It does not outlive the start of the machine in which it was made. A disk that loses power loses writes that it acknowledged and had not flushed, and
// its user has to notice. A consumer would not: its kernel would connect again, flush, and be told that all is safe. Without the export its I/O fails, as
// on a disk that is gone.
type export struct {
	Grant
	word string // random; the export's own
	boot string // the word of the machine's start (Exporting.Boot)
}

var exportPattern = regexp.MustCompile(`^([1-9][0-9]{0,18}):([0-9a-f]{16}):([0-9a-f-]{1,36}):(\S+)$`)

func (e export) label() string {
	return fmt.Sprintf("%d:%s:%s:%s", e.Generation, e.word, e.boot, e.Node)
}

// exportOf returns the export of a record; false if there is none. ErrDataLoss, and true, if the label cannot be read.
func exportOf(r blockdev.Record) (e export, is bool, err error) {
	label := r.Labels[labelExport]
	if label == "" {
		return export{}, false, nil
	}
	parts := exportPattern.FindStringSubmatch(label)
	if parts != nil {
		e.word, e.boot, e.Node = parts[2], parts[3], parts[4]
		e.Generation, err = strconv.ParseInt(parts[1], 10, 64)
	}
	if parts == nil || err != nil {
		return export{}, true, fmt.Errorf("%w: the record of %s says that it is exported, and not to whom; another version of the driver may have written it: "+
			"end the pods that use the volume, which ends what is exported of it", errdefs.ErrDataLoss, r.Ref)
	}
	return e, true, nil
}

// IsExported reports whether the record of a volume names a consumer on another node.
func IsExported(r blockdev.Record) bool { return r.Labels[labelExport] != "" }

func newExport(to Grant, boot string) export {
	word := make([]byte, 8)
	_, _ = rand.Read(word) // it never fails
	return export{to, hex.EncodeToString(word), boot}
}

// nqn returns the name of the subsystem. No other export has the same, of any volume or generation.
func (e export) nqn(key string) string {
	return fmt.Sprintf("%s%s:%d:%s", nvmet.Prefix, key, e.Generation, e.word)
}

// derived returns 32 bytes for a purpose. Only the holder of the node's key can compute them.
func derived(node []byte, nqn, purpose string) []byte {
	mac := hmac.New(sha256.New, node)
	mac.Write([]byte(purpose + "\x00" + nqn))
	return mac.Sum(nil)
}

// hostProof returns the part of a host's name that is derived from the node's key.
func hostProof(node []byte, nqn string) string {
	return fmt.Sprintf("%x", derived(node, nqn, "host")[:8])
}

// host returns the name of the only host that may connect.
func (e export) host(node []byte, volume string) string {
	consumer := sha256.Sum256([]byte(e.Node))
	return fmt.Sprintf("%snode:%x:%s", nvmet.Prefix, consumer[:8], hostProof(node, e.nqn(volume)))
}

// secret returns the secret by which the host authenticates.
func (e export) secret(node []byte, volume string) secret.Text {
	return nvmet.Secret(derived(node, e.nqn(volume), "secret"))
}

// psk returns the pre-shared key of TLS between this node and the host.
func (e export) psk(node []byte, volume string) secret.Text {
	return nvmet.PSK(derived(node, e.nqn(volume), "psk"))
}

// uuid returns the UUID of the namespace. Each export has its own: the kernel refuses a UUID that another subsystem has, as that of an earlier generation
// may be left.
func (e export) uuid(key string) string {
	sum := sha256.Sum256([]byte(e.nqn(key)))
	sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80 // RFC 9562, version 8
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}
