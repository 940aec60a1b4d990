// Makes once what a manager needs to rent VMs in one region of one subscription:
//   az deployment sub create --location westeurope --template-file manager.bicep --parameters region=westeurope
// Its outputs are the section `azure` of the manager's clouds.yaml. See docs/clouds/azure.md.

targetScope = 'subscription'

@description('The region of the network and of all worker VMs, such as westeurope.')
param region string

@description('What the names of everything begin with; another name makes another, separate set.')
param name string = 'makara'

@description('For `makara up`: from which addresses (203.0.113.0/24) people reach the manager\'s VM. Empty: from none.')
param managerFrom string = ''

resource managerGroup 'Microsoft.Resources/resourceGroups@2024-03-01' = {
  name: name
  location: region
}

// Worker VMs and what belongs to them, and nothing else: what is left over is seen at a glance.
resource workerGroup 'Microsoft.Resources/resourceGroups@2024-03-01' = {
  name: '${name}-workers'
  location: region
}

// The VM of `makara up azure`, where no worker may delete anything.
resource hostGroup 'Microsoft.Resources/resourceGroups@2024-03-01' = {
  name: '${name}-manager'
  location: region
}

module network 'network.bicep' = {
  name: '${name}-network'
  scope: managerGroup
  params: {
    name: name
    region: region
    managerFrom: managerFrom
  }
}

// ---- the manager: in the workers' group, on the network, and in the subscription's catalog ----

resource renter 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(subscription().id, name, 'renter')
  properties: {
    roleName: '${name} renter'
    description: 'Creates and deletes worker VMs with their interfaces, disks and addresses.'
    type: 'CustomRole'
    assignableScopes: [subscription().id]
    permissions: [
      {
        actions: [
          'Microsoft.Compute/virtualMachines/read'
          'Microsoft.Compute/virtualMachines/write'
          'Microsoft.Compute/virtualMachines/delete'
          'Microsoft.Compute/virtualMachines/instanceView/read'
          'Microsoft.Compute/virtualMachines/retrieveBootDiagnosticsData/action'
          'Microsoft.Compute/disks/read'
          'Microsoft.Compute/disks/write'
          'Microsoft.Compute/disks/delete'
          'Microsoft.Network/networkInterfaces/read'
          'Microsoft.Network/networkInterfaces/write'
          'Microsoft.Network/networkInterfaces/join/action'
          'Microsoft.Network/networkInterfaces/delete'
          'Microsoft.Network/publicIPAddresses/read'
          'Microsoft.Network/publicIPAddresses/write'
          'Microsoft.Network/publicIPAddresses/join/action'
          'Microsoft.Network/publicIPAddresses/delete'
        ]
      }
    ]
  }
}

resource attacher 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(subscription().id, name, 'attacher')
  properties: {
    roleName: '${name} attacher'
    description: 'Puts VMs into the network and gives them their identity; changes neither.'
    type: 'CustomRole'
    assignableScopes: [subscription().id]
    permissions: [
      {
        actions: [
          'Microsoft.Network/virtualNetworks/subnets/join/action'
          'Microsoft.Network/networkSecurityGroups/join/action'
          'Microsoft.ManagedIdentity/userAssignedIdentities/assign/action'
        ]
      }
    ]
  }
}

resource shopper 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(subscription().id, name, 'shopper')
  properties: {
    roleName: '${name} shopper'
    description: 'Reads which types of VM and images there are, the quota, and what has become of a request.'
    type: 'CustomRole'
    assignableScopes: [subscription().id]
    permissions: [
      {
        actions: [
          'Microsoft.Compute/skus/read'
          'Microsoft.Compute/locations/publishers/artifacttypes/offers/skus/versions/read'
          'Microsoft.Compute/locations/usages/read'
          'Microsoft.Compute/locations/operations/read'
        ]
      }
    ]
  }
}

// ---- a worker: it may delete worker VMs, which is how one ends itself, and nothing else ----

resource leaver 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(subscription().id, name, 'leaver')
  properties: {
    roleName: '${name} leaver'
    description: 'Deletes worker VMs. One that was only shut down from inside would be billed on.'
    type: 'CustomRole'
    assignableScopes: [subscription().id]
    permissions: [
      {
        actions: [
          'Microsoft.Compute/virtualMachines/delete'
        ]
      }
    ]
  }
}

module renting 'right.bicep' = {
  name: '${name}-renting'
  scope: workerGroup
  params: {
    principal: network.outputs.managerPrincipal
    role: renter.id
  }
}

module attaching 'right.bicep' = {
  name: '${name}-attaching'
  scope: managerGroup
  params: {
    principal: network.outputs.managerPrincipal
    role: attacher.id
  }
}

module leaving 'right.bicep' = {
  name: '${name}-leaving'
  scope: workerGroup
  params: {
    principal: network.outputs.workerPrincipal
    role: leaver.id
  }
}

// By which a manager's VM ends itself; whoever calls `makara up` needs the right to rent there, too.
module ending 'right.bicep' = {
  name: '${name}-ending'
  scope: hostGroup
  params: {
    principal: network.outputs.managerPrincipal
    role: leaver.id
  }
}

resource shopping 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(subscription().id, name, 'shopping')
  properties: {
    principalId: network.outputs.managerPrincipal
    principalType: 'ServicePrincipal'
    roleDefinitionId: shopper.id
  }
}

output subscription_id string = subscription().subscriptionId
output resource_group string = workerGroup.name
output region string = region
output subnet_id string = network.outputs.subnetId
output security_group_id string = network.outputs.securityGroupId
output identity_id string = network.outputs.workerIdentityId
output store_identity_id string = network.outputs.storeIdentityId
output manager_resource_group string = hostGroup.name
output manager_subnet_id string = network.outputs.managerSubnetId
output manager_security_group_id string = network.outputs.managerSecurityGroupId
output manager_identity_id string = network.outputs.managerIdentityId
output manager_principal string = network.outputs.managerPrincipal // likewise, of a manager that `makara up` made
output store_principal string = network.outputs.storePrincipal // to be given the right to an account's blobs
